"""Makes lattice.json in this folder: python tests/vectors/make_lattice_vectors.py

It is an independent, slow and obvious implementation of docs/masks.md, "lattice". It uses Python integers, polynomials
as lists, and schoolbook products with X^N = −1, all mod 2^32. It imports nothing of Veilbase.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
Q = 2**32
LOWEST, HIGHEST = -(2**31), 2**31 - 1
Matrix = list[list[int]]


def centred(number: int) -> int:
    """Returns the number in [−2^31, 2^31) that equals the given one mod 2^32."""
    return (number + 2**31) % Q - 2**31


def negacyclic(a: list[int], b: list[int]) -> list[int]:
    """Returns the product a·b in Z[X]/(X^N + 1)."""
    degree = len(a)
    out = [0] * degree
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            if i + j < degree:
                out[i + j] += x * y
            else:
                out[i + j - degree] -= x * y
    return out


def combine(matrix: Matrix, secret: Matrix) -> Matrix:
    """Returns the rows of the product: row t, column c is coefficient t of Σ_i matrix_{i,c}·s_i mod 2^32. The matrix
    has k·N rows, and the secret k rows of N."""
    degree = len(secret[0])
    num_columns = len(matrix[0])
    out = [[0] * num_columns for _ in range(degree)]
    for c in range(num_columns):
        for i, polynomial in enumerate(secret):
            column = [matrix[i * degree + j][c] for j in range(degree)]
            for t, value in enumerate(negacyclic(column, polynomial)):
                out[t][c] += value
    return [[centred(value) for value in row] for row in out]


def matmul(a: Matrix, b: Matrix) -> Matrix:
    columns = list(zip(*b, strict=True))
    return [[centred(sum(x * y for x, y in zip(row, column, strict=True))) for column in columns] for row in a]


def case(
    name: str, degree: int, rank: int, widths: tuple[int, int], draw: Callable[[], int], trit: Callable[[], int]
) -> dict[str, object]:
    rng = random.Random(name)
    d, m = widths
    public = [[draw() for _ in range(d)] for _ in range(rank * degree)]
    secret = [[trit() for _ in range(degree)] for _ in range(rank)]
    error = [[sum(rng.randint(0, 1) - rng.randint(0, 1) for _ in range(21)) for _ in range(d)] for _ in range(degree)]
    weight = [[rng.randint(-127, 127) for _ in range(m)] for _ in range(d)]
    hint = matmul(public, weight)
    clean = combine(public, secret)
    mask = [[centred(x + e) for x, e in zip(*rows, strict=True)] for rows in zip(clean, error, strict=True)]
    effect = combine(hint, secret)
    products = zip(matmul(mask, weight), effect, strict=True)
    left = [[centred(x - y) for x, y in zip(*rows, strict=True)] for rows in products]
    if left != matmul(error, weight):
        raise SystemExit("mask·W − effect is not e·W: this script is wrong")
    return {
        "name": name, "ring_degree": degree, "rank": rank, "public": public, "secret": secret, "error": error,
        "weight": weight, "hint": hint, "mask": mask, "effect": effect,
    }  # fmt: skip


def cases() -> list[dict[str, object]]:
    rng = random.Random(32)

    def any32() -> int:
        return rng.randint(LOWEST, HIGHEST)

    def trit() -> int:
        return rng.randint(-1, 1)

    return [
        case("random, 2x8", 8, 2, (3, 4), any32, trit),
        case("random, 3x16", 16, 3, (2, 3), any32, trit),
        case("random, 1x32", 32, 1, (2, 2), any32, trit),
        case("the smallest ring, 4x2", 2, 4, (3, 2), any32, trit),
        case("extreme coefficients, 2x8", 8, 2, (3, 3), lambda: rng.choice([LOWEST, HIGHEST]), trit),
        case("all lowest, secret all ones", 8, 3, (2, 2), lambda: LOWEST, lambda: 1),
        case("all highest, secret all minus ones", 16, 2, (2, 2), lambda: HIGHEST, lambda: -1),
        case("a secret of zeros", 8, 1, (2, 2), any32, lambda: 0),
        case("24 significant bits", 16, 2, (2, 2), lambda: any32() // 256 * 256, trit),
    ]


def main() -> None:
    lines = ",\n".join(json.dumps(made, separators=(", ", ": ")) for made in cases())
    text = f'{{"source": "tests/vectors/make_lattice_vectors.py", "cases": [\n{lines}\n]}}\n'
    (HERE / "lattice.json").write_text(text)


if __name__ == "__main__":
    main()
