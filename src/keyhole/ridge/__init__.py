"""Ridge regression with exact leave-one-out. Nothing here knows of sets or heads."""
