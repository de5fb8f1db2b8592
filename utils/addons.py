"""The one place where the core takes up what it can do without: utils/extras/.

Each function here asks whether an option (or what is on the disk) calls for a file of extras/, and
imports it only then. Nothing else in the core imports from there; the scripts import the extras
that are their mode (fsdp, o2, apex). Extras import the core, not one another.
"""

# ---- data


# ---- a run: its directory, snapshots, end


# ---- the start of processes


# ---- model and training step
