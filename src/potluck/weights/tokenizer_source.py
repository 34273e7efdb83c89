"""Where tokenizers come from: GGUF metadata, or a Hugging Face folder. Both readers give the same TokenizerSpec."""

from potluck.weights.tokenizer_folder import tokenizer_from_folder
from potluck.weights.tokenizer_gguf import tokenizer_from_gguf

__all__ = ["tokenizer_from_folder", "tokenizer_from_gguf"]
