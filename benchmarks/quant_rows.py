"""What bench_quant measures: by row our own settings, and peers of as many bits."""

from dataclasses import replace

import quant_peers
from pippin import recipe

TOKENS = 16_384  # that calibrate
AFFINE = recipe.Quantize(
    method="best",
    group_size=64,
    scheme="affine",
    embed_bits=8,
    embed_group_size=64,
    embed_scheme="affine",
    calibration_tokens=TOKENS,
)
SYMMETRIC = replace(AFFINE, scheme="symmetric", embed_scheme="symmetric", embed_group_size=32)
# 4.5 bits of each of the model's 134,515,008 weights, norms among them.
WHOLE = "75.66MB"
# By row: the first figure is ours, the others stand beside it. Moments of the first serve all.
ROWS: dict[str, dict[str, recipe.Quantize | quant_peers.Peer]] = {
    "quant-kl-all-4.5": {
        "best, all shared out, symmetric": replace(SYMMETRIC, max_size=WHOLE, embed_group_size=64),
        "best, all shared out, symmetric, recovered": replace(
            SYMMETRIC, max_size=WHOLE, embed_group_size=64, recover_tokens=TOKENS
        ),
        "best, affine g64": replace(AFFINE, embed_bits=4),
        "rtn, affine g64": replace(AFFINE, method="rtn", embed_bits=4),
        "mlx nearest, affine g64": quant_peers.whole(quant_peers.mlx_affine),
        "gguf Q4_0": quant_peers.whole(quant_peers.gguf_symmetric),
        "llama.cpp IQ4_NL": quant_peers.whole(quant_peers.llama("IQ4_NL")),
        "llama.cpp Q4_K": quant_peers.whole(quant_peers.llama("Q4_K")),
    },
    "quant-kl-4.5": {
        "best, 4.5 bits shared out, symmetric": replace(SYMMETRIC, target_bits=4.5),
        "best, 4.5 bits shared out, symmetric, recovered": replace(
            SYMMETRIC, target_bits=4.5, recover_tokens=TOKENS
        ),
        "best, 4.5 bits shared out, symmetric, recovered in two passes": replace(
            SYMMETRIC, target_bits=4.5, recover_tokens=2 * TOKENS, recover_passes=2
        ),
        "best, 4.5 bits shared out, affine": replace(AFFINE, target_bits=4.5),
        "best, affine g64": AFFINE,
        "best, symmetric g32": replace(SYMMETRIC, group_size=32),
        "rtn, affine g64": replace(AFFINE, method="rtn"),
        "mlx nearest, affine g64": quant_peers.mlx_affine,
        "gguf Q4_0": quant_peers.gguf_symmetric,
        **quant_peers.llama_both("IQ4_NL"),
        **quant_peers.llama_both("Q4_K"),
        "hqq package, affine g64": quant_peers.hqq_affine,
        "mlx-lm gptq, affine g64": quant_peers.mlx_gptq,
        "llm-compressor gptq, affine g64": quant_peers.compressor_gptq,
        "hqq, affine g64": replace(AFFINE, method="hqq"),
        "mse, affine g64": replace(AFFINE, method="mse"),
        "gptq, affine g64": replace(AFFINE, method="gptq"),
        "gptq, layer after layer, affine g64": replace(AFFINE, method="gptq", sequential=True),
        "awq, affine g64": replace(AFFINE, method="awq"),
        "best, inputs alike, affine g64": replace(AFFINE, importance="inputs"),
    },
    "quant-kl-4.25": {
        "best, 4.25 bits shared out, symmetric": replace(SYMMETRIC, target_bits=4.25),
        "best, symmetric g64": SYMMETRIC,
        "rtn, symmetric g64": replace(SYMMETRIC, method="rtn"),
        "mlx mxfp4": quant_peers.mlx_mxfp4,
        **quant_peers.llama_both("IQ4_XS"),
    },
    "quant-kl-3.5": {
        "best, 3.5 bits shared out, symmetric": replace(SYMMETRIC, target_bits=3.5),
        "best, affine g64": replace(AFFINE, bits=3),
        "rtn, affine g64": replace(AFFINE, method="rtn", bits=3),
        "mlx nearest, affine g64": quant_peers.linears(quant_peers.mlx_affine, 3),
        **quant_peers.llama_both("Q3_K"),
        **quant_peers.llama_both("IQ3_S"),
    },
    # What a GGUF file of this model holds: Q5_0 where 256 does not divide a row.
    "quant-kl-5.25": {
        "best, K types of 4 bits": replace(AFFINE, scheme="k"),
        **quant_peers.llama_both("Q4_K", otherwise="Q5_0"),
    },
    "quant-kl-5.5": {
        "best, 5.5 bits shared out, symmetric": replace(SYMMETRIC, target_bits=5.5),
        **quant_peers.llama_both("Q5_K"),
    },
    "quant-kl-6.5": {
        "best, 6.5 bits shared out, symmetric": replace(SYMMETRIC, target_bits=6.5),
        **quant_peers.llama_both("Q6_K"),
    },
}
