"""A Hugging Face folder as a transformers model: safetensors only, strict, one copy in memory."""

import contextlib
import copy
from collections.abc import Collection, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging

from pippin.engines.torch.body import body
from pippin.engines.torch.packed import pack, packable
from pippin.errors import ModelError, first_line
from pippin.model import names
from pippin.model.quantized import DenseView
from pippin.model.weights import Checkpoint, Tensors, row_chunks

PIECE_BYTES = 16 << 20  # of a tensor in float32


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """How a network is made.

    `remote_code` takes the config and model classes that `auto_map` names from the folder's code;
    `math` computes attention in plain products instead of PyTorch's fused kernels.
    """

    remote_code: bool = False
    math: bool = False


def load_network(
    folder: Path, dtype: torch.dtype, device: torch.device, options: LoadOptions = LoadOptions()
) -> PreTrainedModel:
    """The folder's causal language model on `device`, frozen, in evaluation mode.

    A folder quantized in our layout is dequantized while it loads; in bfloat16, on a CPU or on
    CUDA, linears that have a kernel there keep their codes. Half precision turns into float32 on a
    CPU piece by piece: transformers would keep the file in memory beside it. Raises ModelError for
    a folder that is not a model, and for tensors that are missing, left over or of another shape.
    """
    config = _read_config(folder, options.remote_code)
    kind = _model_class(folder, config)
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": folder,
        **_attention(config, options),
    }
    view, kernels = None, {}
    if getattr(config, "quantization", None):
        for key in ("quantization", "quantization_config"):
            config.__dict__.pop(key, None)
        view = DenseView(folder)
        kernels = packable(view, _linears(kind, config), device, dtype)
    elif device.type == "cpu" and dtype == torch.float32 and _stores_halves(folder):
        view = DenseView(folder)
    if view is not None:
        tensors = _dense(view, dtype, kernels)
        source |= {"pretrained_model_name_or_path": None, "state_dict": tensors}
    network = _load(kind, config, folder, dtype=dtype, device=device, **source)
    if view is not None:
        pack(network, view, kernels)
    return network.eval().requires_grad_(False)


def empty_network(folder: Path, dtype: torch.dtype) -> PreTrainedModel | None:
    """The folder's network without weights, its layers on the meta device; None for none such.

    What stands outside of the layers has memory and random weights.
    """
    config = _read_config(folder, remote_code=False)
    kind, text = _model_class(folder, config), config.get_text_config()
    for key in ("quantization", "quantization_config"):
        config.__dict__.pop(key, None)
    made = {"dtype": dtype, **_attention(config, LoadOptions())}
    with torch.device("meta"):
        whole = kind._from_config(config, **made)
    if not hasattr(body(whole), "layers"):
        return None
    without, count = copy.deepcopy(config), text.num_hidden_layers
    without.get_text_config().num_hidden_layers = 0
    network = kind._from_config(without, **made)
    body(network).layers = body(whole).layers
    without.get_text_config().num_hidden_layers = count
    return network


def read_tensor(weights: Tensors, name: str) -> Tensor:
    """A tensor in its stored dtype, in memory of its own."""
    return _tensor(weights.read(name))


def _read_config(folder: Path, remote_code: bool) -> Any:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json", "give a folder in Hugging Face's layout")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{folder} has no *.safetensors file", "convert the weights to safetensors first"
        )
    try:
        return AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=remote_code
        )
    except (ValueError, KeyError, OSError) as error:
        raise ModelError(
            f"{folder}: transformers {transformers.__version__} cannot read its config.json: "
            f"{first_line(error)}",
            "update transformers, or choose a model whose architecture it knows",
        ) from error


def _load(
    kind: Any, config: Any, folder: Path, *, device: torch.device, **source: Any
) -> PreTrainedModel:
    try:
        with _quiet():
            network, report = kind.from_pretrained(
                **source,
                config=config,
                device_map={"": device} if device.type != "cpu" else None,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported, and refused below with the tensor's name
            )
    except (RuntimeError, OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"{folder} does not load: {first_line(error)}",
            "fetch the model again; if it was made by a tool, make it again",
        ) from error
    _refuse_gaps(folder, report)
    return network


def _model_class(folder: Path, config: Any) -> Any:
    own = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    # A config class that the folder's code defines was only made because that code may run.
    if own and type(config).__module__.startswith("transformers_modules"):
        return get_class_from_dynamic_module(own, folder, local_files_only=True)
    mapping: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping:
        raise ModelError(
            f"{folder}: {config.model_type} is not a causal language model",
            "choose a model that generates text",
        )
    return mapping[type(config)]


def _attention(config: Any, options: LoadOptions) -> dict[str, str]:
    """Some versions of transformers leave Gemma 2's soft cap out of their fused attention."""
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return {"attn_implementation": "eager"} if capped or options.math else {}


def _linears(kind: Any, config: Any) -> set[str]:
    """Names of the plain linears below the head, from a network that takes no memory."""
    with torch.device("meta"):
        modules = kind(config).named_modules()
        return {name for name, m in modules if type(m) is nn.Linear and not names.is_head(name)}


def _dense(view: DenseView, dtype: torch.dtype, packed: Collection[str]) -> dict[str, Tensor]:
    """Every weight in `dtype`; in the place of a packed one, zeros that take no memory."""
    zero = torch.zeros((), dtype=dtype)
    return {
        name: zero.expand(spec.shape) if name in packed else _read(view, name, dtype)
        for name, spec in view.tensors.items()
    }


def _read(view: DenseView, name: str, dtype: torch.dtype) -> Tensor:
    """A weight in `dtype`: what it is made from exists in pieces."""
    spec = view.tensors[name]
    if not spec.shape:
        return _tensor(view.read(name)).to(dtype)
    whole = torch.empty(spec.shape, dtype=dtype)
    for start, stop in row_chunks(spec, PIECE_BYTES):
        whole[start:stop] = _tensor(view.read_rows(name, start, stop))
    return whole


def _stores_halves(folder: Path) -> bool:
    stored = {info.dtype.name for info in Checkpoint(folder).tensors.values()}
    return stored <= {"bfloat16", "float16"}


def _tensor(array: Any) -> Tensor:
    """torch.from_numpy does not know ml_dtypes' bfloat16: the same bits under another name."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def _refuse_gaps(folder: Path, report: dict[str, Any]) -> None:
    faults = {
        "lacks": report["missing_keys"],
        "has tensors of another shape:": [key[0] for key in report["mismatched_keys"]],
        "has tensors the architecture does not know:": report["unexpected_keys"],
    }
    for text, keys in faults.items():
        if keys:
            some = ", ".join(sorted(keys)[:3])
            raise ModelError(
                f"{folder} {text} {some} ({len(keys)} in all)",
                "config.json and the weights must belong together; fetch the model again",
            )


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """transformers without bars and reports: what they tell is checked above."""
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
