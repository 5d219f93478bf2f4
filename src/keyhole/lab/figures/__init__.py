"""One file per figure of `keyhole reproduce`: Config, PRESETS, cells, section."""
