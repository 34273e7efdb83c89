"""Tiny random models of every family, made and run by transformers: the reference that nobody here wrote."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tests.support.family_configs import CASES, TINY, model_class_of
from tests.support.family_configs import transformers as hf

Floats = npt.NDArray[np.float32]
SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 4}
# More heads, so that a head stays as wide as the four factors that the configuration holds.
_OF_CASE = {"phi3 long": {"num_attention_heads": 8}, "gemma3": {"num_hidden_layers": 7}}


def random_model(case: str, **more: object) -> hf.PreTrainedModel:
    """Weights large enough that logits are far from flat; norms and biases random too. `more` changes the configuration."""
    family, changes = CASES[case]
    config = getattr(hf, f"{family}Config")(**TINY | SIZES | changes | _OF_CASE.get(case, {}) | more)
    config._attn_implementation = "eager"
    model = model_class_of(case)(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "embed_tokens" in name:  # Gemma multiplies it by the square root of the hidden size
                parameter.copy_(noise / (8.0 if family.startswith("Gemma") else 1.0))
            elif parameter.ndim == 2:
                parameter.copy_(noise * 1.6 / parameter.shape[1] ** 0.5)
            elif name.endswith("bias") or family.startswith("Gemma"):  # Gemma adds one to its norms' weights
                parameter.copy_(noise * 0.3)
            else:
                parameter.copy_(noise * 0.3 + 1.0)
    return model


def save(model: hf.PreTrainedModel, folder: Path) -> Path:
    hf.utils.logging.disable_progress_bar()
    model.save_pretrained(folder, safe_serialization=True)
    return folder


def logits_of(model: hf.PreTrainedModel, tokens: list[int]) -> Floats:
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()


def relative_difference(got: Floats, wanted: Floats) -> float:
    """The largest difference beside the largest logit."""
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())
