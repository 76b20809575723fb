"""Does the address of an operand change a product's bits? One weight, at each address modulo 64.

Kernels handle what lies before the first aligned vector apart, and so add in another order. This
is why a recorded operand says where its memory began, and why a replay puts it there.

    python benchmarks/alignment.py
"""

from __future__ import annotations

import torch

from divergence.ops.replay import laid_out
from divergence.run.manifest import digest_tensor

HIDDEN = 1024


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    print(f"x (M, {HIDDEN}) @ W ({HIDDEN}, {HIDDEN}), W transposed in memory as a linear layer's")
    print(f"CPU capability {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}")
    print(f"{'dtype':10} {'M':>4}  different results over all addresses modulo 64 of W")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rows in (1, 4, 16, 64):
            x = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
            weight = torch.randn(HIDDEN, HIDDEN, generator=generator).to(dtype)
            found = {
                digest_tensor(torch.mm(x, laid_out(weight, None, misalignment_bytes=at).t()))
                for at in range(0, 64, dtype.itemsize)
            }
            print(f"{str(dtype).removeprefix('torch.'):10} {rows:4}  {len(found)}")


if __name__ == "__main__":
    main()
