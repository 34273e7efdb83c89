"""Numbers that kernels and their callers share; here because the plain form needs them where there is no Triton."""

from potluck.engine.kv_format import PAGE_POSITIONS

FEW_ROWS = 64  # up to here rows go through the decoding kernels; more are the matrix library's
SPLIT_PAGES = 4  # of attention's spans: fixed, because the order of sums is a session's business and not its batch's
SPLIT_POSITIONS = SPLIT_PAGES * PAGE_POSITIONS
