"""How processes start, find each other, compare their set-up, share values and end."""
