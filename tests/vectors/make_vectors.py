"""Makes the golden vectors in this folder: python tests/vectors/make_vectors.py

It is an independent, slow and obvious implementation of wire/SPEC.md, sections 3 and 5. It uses Python integers and
exact fractions, numpy only to round a number to float32, and OpenSSL's AES-CTR one row at a time. It imports nothing of
Veilbase, so that a mistake in `wire` cannot confirm itself.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

HERE = Path(__file__).resolve().parent
Q = 2**32
LOWEST, HIGHEST = -(2**31), 2**31 - 1


def float32(number: float) -> float:
    return float(np.float32(number))


def bits(number: float) -> str:
    """Returns a float32 as eight hex digits, the most significant first."""
    return struct.pack(">f", number).hex()


def from_bits(digits: str) -> float:
    return float(struct.unpack(">f", bytes.fromhex(digits))[0])


def divide(a: float, b: float) -> float:
    """Returns a / b rounded once to float32, by the division of np.float32, which is checked against exact
    fractions."""
    quotient = np.float32(a) / np.float32(b)
    exact = Fraction(a) / Fraction(b)
    for neighbour in (np.nextafter(quotient, np.float32(-np.inf)), np.nextafter(quotient, np.float32(np.inf))):
        assert abs(exact - Fraction(float(quotient))) <= abs(exact - Fraction(float(neighbour)))
    return float(quotient)


def half_to_even(number: float) -> int:
    """Rounds an exact fraction to the nearest integer, and ties to even, as Python's `round` does."""
    return round(Fraction(number))


def quantise(weight: list[list[float]]) -> tuple[list[list[int]], list[float]]:
    """Quantises a weight as wire/SPEC.md, section 5, prescribes."""
    num_rows, num_columns = len(weight), len(weight[0])
    alpha = []
    for j in range(num_columns):
        largest = max(abs(weight[i][j]) for i in range(num_rows))
        alpha.append(divide(max(largest, float32(1e-8)), 127.0))
    rounded = [
        [min(127, max(-127, half_to_even(divide(weight[i][j], alpha[j])))) for j in range(num_columns)]
        for i in range(num_rows)
    ]
    return rounded, alpha


def digest(rounded: list[list[int]], alpha: list[float]) -> str:
    sha = hashlib.sha256()
    for row in rounded:
        sha.update(struct.pack(f"<{len(row)}b", *row))
    sha.update(struct.pack(f"<{len(alpha)}f", *alpha))
    return sha.hexdigest()


def product(rows: list[list[int]], weight: list[list[int]]) -> list[list[int]]:
    """Returns rows · weight mod q, as numbers in [−2^31, 2^31)."""
    columns = list(zip(*weight, strict=True))
    return [
        [(sum(a * b for a, b in zip(row, column, strict=True)) + 2**31) % Q - 2**31 for column in columns]
        for row in rows
    ]


def column(*numbers: float) -> list[list[float]]:
    return [[float32(number)] for number in numbers]


def quantise_cases() -> list[dict[str, Any]]:
    rng = random.Random(20240607)
    tiny, huge = 2.0**-149, float(np.finfo(np.float32).max)
    near = [float(np.nextafter(np.float32(tie), np.float32(side))) for tie in (0.5, 1.5, 2.5) for side in (-9, 9)]
    weights = {
        "ties go to even: alpha is exactly 1": column(127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -126.5, 125.5),
        "ties with alpha exactly 2^-7": column(127 / 128, *(k / 256 for k in range(-9, 10, 2))),
        "next to a tie": column(127, *near),
        "a column of zeros beside others": [[0.0, 1.0, -3.0], [0.0, -1.0, 2.0], [-0.0, 0.25, 0.0]],
        "all negative": column(-1.0, -0.1, -0.01, -1e-9),
        "below the floor of 1e-8": column(3e-9, -9.9e-9, 1e-12, 5e-11),
        "denormals only": column(tiny, -tiny, 1000 * tiny),
        "exactly the floor": column(1e-8, -1e-8, 5e-9),
        "just above the floor": column(float(np.nextafter(np.float32(1e-8), np.float32(1))), -1e-8, 4e-11),
        "largest float32": column(huge, -huge, huge / 2, 1.0),
        "forty orders of magnitude in one column": column(1e20, 1e-20, -1e19, 5e17, -3.9e17),
        "a scale for every column": [[10.0**k * s for k in range(-12, 13, 4)] for s in (1, -0.5, 0.3333, -0.004, 0.0)],
        "one number": column(-0.7),
        "one row": [[0.3, -0.7, 0.0, 1e-30]],
    }
    for index in range(6):
        num_rows, num_columns = rng.choice([(3, 5), (16, 4), (7, 9)])
        scale = 10 ** rng.uniform(-6, 3)
        weights[f"random {index}"] = [[rng.gauss(0, scale) for _ in range(num_columns)] for _ in range(num_rows)]
    cases = []
    for name, weight in weights.items():
        narrow = [[float32(number) for number in row] for row in weight]
        rounded, alpha = quantise(narrow)
        cases.append(
            {
                "name": name,
                "weight": [[bits(number) for number in row] for row in narrow],
                "quantised": rounded,
                "alpha": [bits(number) for number in alpha],
                "digest": digest(rounded, alpha),
                "largest_squared_column_norm": max(sum(v * v for v in c) for c in zip(*rounded, strict=True)),
                "largest_squared_row_norm": max(sum(v * v for v in r) for r in rounded),
            }
        )
    return cases


def ring_cases() -> list[dict[str, Any]]:
    rng = random.Random(7)
    extremes = [LOWEST, LOWEST + 1, -(2**24), -257, -256, -1, 0, 1, 255, 256, 65535, 2**24, HIGHEST - 1, HIGHEST]

    def ints(num_rows: int, num_columns: int, pick: Any) -> list[list[int]]:
        return [[pick() for _ in range(num_columns)] for _ in range(num_rows)]

    def any32() -> int:
        return rng.randint(LOWEST, HIGHEST)

    def any8() -> int:
        return rng.randint(-127, 127)

    pairs = {
        "every extreme times every extreme": ([[a] for a in extremes], [[-127, -1, 0, 1, 127]]),
        "lowest times 127, 64 times": ([[LOWEST] * 64, [HIGHEST] * 64], [[127, -127]] * 64),
        "all bytes 255": ([[-1] * 33] * 2, [[127, -127, 1]] * 33),
        "alternating signs": ([[LOWEST, HIGHEST] * 20], [[127, -127], [-127, 127]] * 20),
        "one number": ([[-5]], [[7]]),
        "one row": (ints(1, 17, any32), ints(17, 6, any8)),
        "one column of weights": (ints(3, 17, any32), ints(17, 1, any8)),
        "one feature": (ints(3, 1, any32), ints(1, 6, any8)),
        "random": (ints(5, 40, any32), ints(40, 9, any8)),
        "extremes at random": (ints(4, 30, lambda: rng.choice(extremes)), ints(30, 8, lambda: rng.choice([-127, 127]))),
    }
    return [
        {"name": name, "rows": rows, "weight": weight, "product": product(rows, weight)}
        for name, (rows, weight) in pairs.items()
    ]


def expand_row(seed: bytes, row: int, cols: int) -> list[int]:
    """Returns one row of a seed's expansion, as wire/SPEC.md, section 5, prescribes."""
    key = hashlib.sha256(b"veilbase expand v1\x00" + seed).digest()
    aes_ctr = Cipher(algorithms.AES(key), modes.CTR(row.to_bytes(8, "big") + bytes(8))).encryptor()
    return list(struct.unpack(f"<{cols}i", aes_ctr.update(bytes(4 * cols))))


def expand_cases() -> list[dict[str, Any]]:
    rng = random.Random(48)
    ranges = {
        "zero seed, first row": (bytes(32), 0, 1, 8),
        "counting seed": (bytes(range(32)), 0, 4, 12),
        "the same rows, fewer features": (bytes(range(32)), 0, 4, 5),
        "rows from the middle": (bytes(range(32)), 2, 2, 12),
        "one number": (b"\xff" * 32, 7, 1, 1),
        "a block and one number": (b"\xff" * 32, 7, 2, 5),
        "row numbers that need more than one byte": (rng.randbytes(32), 254, 4, 4),
        "row numbers beyond 32 bits": (rng.randbytes(32), 2**32 - 1, 3, 6),
        "the last rows": (rng.randbytes(32), 2**40 - 2, 2, 4),
        "block numbers that need more than one byte": (rng.randbytes(32), 3, 1, 4 * 258),
        "no rows": (rng.randbytes(32), 5, 0, 3),
        "no features": (rng.randbytes(32), 5, 2, 0),
    }
    return [
        {
            "name": name, "seed": seed.hex(), "first_row": first, "num_rows": count, "features": cols,
            "payload": (seed + first.to_bytes(8, "little") + count.to_bytes(8, "little")).hex(),
            "rows": [expand_row(seed, row, cols) for row in range(first, first + count)],
        }
        for name, (seed, first, count, cols) in ranges.items()
    ]  # fmt: skip


FIELDS = (  # wire/SPEC.md, section 3: offset, bytes, name
    (0, 1, "type"), (1, 1, "direction"), (2, 1, "arithmetic"), (3, 1, "purpose"), (4, 4, "group"), (8, 8, "request_id"),
    (16, 4, "rows"), (20, 4, "cols"), (24, 8, "offset"), (32, 8, "total_bytes"), (40, 4, "deadline_ms"),
    (44, 2, "code"), (46, 1, "dropped"), (47, 1, "reply_dropped"),
)  # fmt: skip


def pack(rows: list[list[int]], width: int) -> bytes:
    """Packs numbers of `width` bits, as wire/SPEC.md, section 3, prescribes: each row as one long whole number."""
    out = b""
    for row in rows:
        whole = 0
        for place, number in enumerate(row):
            shifted = number % Q + (1 << 31 - width if width < 32 else 0)  # halves are rounded up
            whole |= (shifted >> 32 - width) % 2**width << place * width
        out += whole.to_bytes(-(-len(row) * width // 8), "little")
    return out


def packed_cases() -> list[dict[str, Any]]:
    """Makes rows, their packed bytes, the numbers that these stand for, and a product of those with some weights."""
    rng = random.Random(26)
    cases = []
    for width in (16, 24, 26, 28):
        half = 1 << 31 - width
        shapes = {
            "one number": [[5 << 32 - width]],
            "rounding at each side of a half": [[half - 1, half, half + 1, -half - 1, -half, -half + 1]],
            "wraps from the largest to the smallest": [[HIGHEST, HIGHEST - half, HIGHEST - half + 1, LOWEST]],
            "rows that end within a byte": [[rng.randint(LOWEST, HIGHEST) for _ in range(3)] for _ in range(3)],
            "many numbers": [[rng.randint(LOWEST, HIGHEST) for _ in range(21)] for _ in range(2)],
            "no numbers": [[], []],
        }
        for name, rows in shapes.items():
            kept = [[((number % Q + half >> 32 - width) % 2**width << 32 - width) for number in row] for row in rows]
            signed = [[(number + 2**31) % Q - 2**31 for number in row] for row in kept]
            weight = [[rng.randint(-127, 127) for _ in range(2)] for _ in rows[0]]
            cases.append(
                {
                    "name": f"{width} bits: {name}", "bits": width, "rows": rows, "packed": pack(rows, width).hex(),
                    "unpacked": signed, "weight": weight, "product": product(signed, weight),
                }
            )  # fmt: skip
    return cases


def header(fields: dict[str, int]) -> bytes:
    out = bytearray(48)
    for offset, size, name in FIELDS:
        out[offset : offset + size] = fields.get(name, 0).to_bytes(size, "little")
    return bytes(out)


def frame_cases() -> list[dict[str, Any]]:
    call = {"direction": 1, "arithmetic": 0, "purpose": 0, "group": 0x01020304}
    shape = {"rows": 2, "cols": 3, "total_bytes": 24}
    numbers = struct.pack("<6i", 1, -1, LOWEST, HIGHEST, 0, 256)
    frames: list[tuple[str, dict[str, int], bytes]] = [
        ("hello", {"type": 1, "code": 2, "total_bytes": 4}, b"VEIL"),
        ("welcome", {"type": 2, "code": 2, "total_bytes": 4}, b"VEIL"),
        ("request, one frame", {"type": 3, "request_id": 2**63 + 5, "deadline_ms": 30_000, **call, **shape}, numbers),
        ("request, second chunk", {"type": 3, "request_id": 7, "offset": 8, **call, **shape}, numbers[8:]),
        ("request without rows", {"type": 3, "request_id": 9, "cols": 3, "arithmetic": 1, "purpose": 1}, b""),
        ("reply, ring", {"type": 4, "request_id": 7, **call, **shape}, numbers),
        ("reply, float", {"type": 4, "request_id": 8, "arithmetic": 1, "rows": 1, "cols": 2, "total_bytes": 8},
         struct.pack("<2f", 1.5, -0.1)),
        ("request for a hint", {"type": 3, "request_id": 10, "purpose": 2, "rows": 5, "cols": 8, "total_bytes": 48,
                                "deadline_ms": 3_600_000}, bytes(range(32)) + struct.pack("<2Q", 1, 5)),
        ("request, 26 bits", {"type": 3, "request_id": 11, "direction": 1, "group": 5, "rows": 2, "cols": 3,
                              "total_bytes": 20, "dropped": 6, "reply_dropped": 6},
         pack([[1 << 6, -(1 << 6), LOWEST], [HIGHEST, 0, 1 << 12]], 26)),
        ("reply, 16 bits", {"type": 4, "request_id": 12, "rows": 1, "cols": 3, "total_bytes": 6, "dropped": 8,
                            "reply_dropped": 16}, pack([[1 << 16, -(1 << 16), LOWEST]], 16)),
        ("error about a request", {"type": 5, "request_id": 7, "code": 3}, b""),
        ("error about the stream", {"type": 5, "code": 10}, b""),
        ("cancel", {"type": 6, "request_id": 7}, b""),
        ("every field at its largest", {"type": 4, "direction": 1, "arithmetic": 1, "purpose": 2, "group": 2**32 - 1,
                                        "request_id": 2**64 - 1, "rows": 2**32 - 1, "cols": 2**32 - 1,
                                        "offset": 2**64 - 2, "total_bytes": 2**64 - 1, "deadline_ms": 2**32 - 1,
                                        "code": 2**16 - 1}, b"\xff"),
    ]  # fmt: skip
    return [
        {"name": name, "fields": fields, "payload": payload.hex(), "message": (header(fields) + payload).hex()}
        for name, fields, payload in frames
    ]


def write(name: str, cases: list[dict[str, Any]]) -> None:
    lines = ",\n".join(json.dumps(case, separators=(", ", ": ")) for case in cases)
    (HERE / name).write_text(f'{{"source": "tests/vectors/make_vectors.py", "cases": [\n{lines}\n]}}\n')


def main() -> None:
    write("quantise.json", quantise_cases())
    write("ring.json", ring_cases())
    write("frames.json", frame_cases())
    write("expand.json", expand_cases())
    write("packed.json", packed_cases())


if __name__ == "__main__":
    main()
