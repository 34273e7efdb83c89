"""log and a counter-based random generator from plain IEEE operations and integers: the same on every machine."""

import math

_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_MASK32 = 0xFFFFFFFF


def log64(value: float) -> float:
    """Natural logarithm of a positive, finite number; additions, multiplications and divisions only."""
    mantissa, exponent = math.frexp(value)  # exact
    if mantissa < 0.7071067811865476:
        mantissa, exponent = mantissa * 2.0, exponent - 1
    s = (mantissa - 1.0) / (mantissa + 1.0)  # |s| < 0.172
    square = s * s
    total = 0.0
    for k in range(25, 0, -2):
        total = total * square + 1.0 / k
    return exponent * _LN2_HIGH + (exponent * _LN2_LOW + 2.0 * s * total)


def philox(key: int, counter: int) -> tuple[int, int, int, int]:
    """Philox 4x32-10: four random 32-bit words from a 64-bit key and a 128-bit counter."""
    c = [(counter >> shift) & _MASK32 for shift in (0, 32, 64, 96)]
    k0, k1 = key & _MASK32, (key >> 32) & _MASK32
    for _ in range(10):
        left, right = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(right >> 32) ^ c[1] ^ k0, right & _MASK32, (left >> 32) ^ c[3] ^ k1, left & _MASK32]
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c[0], c[1], c[2], c[3]


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) that depends on these three and on nothing else."""
    high, low, _, _ = philox(seed, position | (choice << 64))
    return ((high << 21) | (low >> 11)) * 2.0**-53
