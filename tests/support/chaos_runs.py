"""How many answers are disturbed in the tests with real processes, for each number of shards, and from which seed."""

SEED = 7
DEFAULT_COUNTS = {2: 6, 3: 6, 4: 6}
LONG_COUNTS = {2: 60, 3: 60, 4: 60}
