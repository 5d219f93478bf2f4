"""One file per figure: Config, run, plot."""
