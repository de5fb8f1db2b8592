"""How processes start, meet, agree, talk to each other and end."""
