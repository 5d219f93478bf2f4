"""Fits: the members that are tried, what each is fitted by, and how they are combined."""
