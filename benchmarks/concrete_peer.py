"""Runs the peer of benchmarks/encrypted_matmul.py: Concrete ML's encrypted matrix product.

This script is run by an interpreter that has the wheel `concrete-ml-extensions`, and imports nothing of this
repository. The product uses the wheel's default parameters. Rows and weights are 8-bit integers, as the wheel's own
linear layers quantise them.
"""

import json
import sys
import time

import concrete_ml_extensions as concrete
import numpy as np

POLYNOMIAL_SIZE = 2048
"""The polynomial size of `concrete.default_params()`: the number of columns in each ciphertext but the last."""


def main(num_rows: int, in_features: int, out_features: int) -> None:
    """Makes keys, and prints the seconds that this took. Then, for each line on standard input, computes one product
    and prints its seconds by stage, its bytes and its error. Each output is one line of JSON."""
    rng = np.random.default_rng(0)
    rows = rng.integers(-127, 128, (num_rows, in_features))
    weight = rng.integers(-127, 128, (in_features, out_features))
    parameters = concrete.MatmulCryptoParameters.deserialize(concrete.default_params())
    began = time.perf_counter()
    private_key, compression_key = concrete.create_private_key(parameters)
    print(json.dumps({"keys_s": time.perf_counter() - began}), flush=True)
    for _ in sys.stdin:
        times = [time.perf_counter()]
        encrypted = concrete.encrypt_matrix(private_key, parameters, rows.astype(np.uint64))
        times.append(time.perf_counter())
        product = concrete.matrix_multiplication(encrypted, weight.astype(np.uint64), compression_key)
        times.append(time.perf_counter())
        left_over = out_features % POLYNOMIAL_SIZE or POLYNOMIAL_SIZE
        decrypted = concrete.decrypt_matrix(product, private_key, parameters, left_over)
        times.append(time.perf_counter())
        # results are mod 2^64, so small negative ones are near 2^64
        error = np.abs(np.asarray(decrypted).astype(np.int64) - rows @ weight).max()
        answer = {
            "encrypt_s": times[1] - times[0], "product_s": times[2] - times[1], "decrypt_s": times[3] - times[2],
            "bytes_up": len(encrypted.serialize()), "bytes_down": len(product.serialize()),
            "relative_error": float(error / np.abs(rows @ weight).max()),
        }  # fmt: skip
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*(int(each) for each in sys.argv[1:4]))
