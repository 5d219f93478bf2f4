"""The checker of shapes and types while testing: beartype, with an int accepted where a float is asked for."""

from beartype import BeartypeConf, beartype

checker = beartype(conf=BeartypeConf(is_pep484_tower=True))
