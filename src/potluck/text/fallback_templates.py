"""Chat templates for models that bring none, chosen by the special tokens in their vocabulary. Pure data."""

from potluck.core.tokenizer_spec import TokenizerSpec

CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

LLAMA3 = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif -%}
"""

# Gemma knows no system role: what it would say goes before the first question.
GEMMA = """\
{{- bos_token -}}
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{%- set ns.system = ns.system + message['content'] | trim + '\\n\\n' -%}
{%- else -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{- '<start_of_turn>' + role + '\\n' + ns.system + message['content'] | trim + '<end_of_turn>\\n' -}}
{%- set ns.system = '' -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif -%}
"""

PHI3 = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif -%}
"""

# Llama 2 and Mistral, which differ only in where the system prompt's marks stand; here it goes before the question.
INST = """\
{{- bos_token -}}
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{%- set ns.system = ns.system + message['content'] | trim + '\\n\\n' -%}
{%- elif message['role'] == 'assistant' -%}
{{- ' ' + message['content'] | trim + eos_token -}}
{%- else -%}
{{- '[INST] ' + ns.system + message['content'] | trim + ' [/INST]' -}}
{%- set ns.system = '' -%}
{%- endif -%}
{%- endfor -%}
"""


def fallback_template(spec: TokenizerSpec) -> str:
    """The template of the family whose marks the vocabulary has; ChatML where it has none of them."""
    tokens = set(spec.tokens)
    if "<|im_start|>" in tokens:
        return CHATML
    if "<|start_header_id|>" in tokens:
        return LLAMA3
    if "<start_of_turn>" in tokens:
        return GEMMA
    if {"<|user|>", "<|end|>"} <= tokens:
        return PHI3
    if "[INST]" in tokens or (spec.algorithm == "sentencepiece" and "</s>" in tokens):
        return INST
    return CHATML
