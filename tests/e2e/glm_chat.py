"""A tokenizer and a chat template in the style of the released GLM-5.3-Flash, for a tiny checkpoint.

The template has no switch for thinking: a header gives the effort, and the answer begins within `<think>`. The tags of
reasoning and of calls are tokens, but not special ones: they stay in the text. The tokens that end a turn are special,
and generation_config.json says that they end generation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.e2e.glm_checkpoints import GLM_SPECIAL_TOKENS, random_glm5_next

TAGS = ("<think>", "</think>")
MORE_TAGS = (
    "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<tool_response>", "</tool_response>",
)  # fmt: skip
MORE_SPECIAL = ("[gMASK]", "<sop>", "<|system|>", "<|observation|>")
ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")
TEMPLATE = """\
[gMASK]<sop>
{%- if tools %}<|system|>
# Tools

Signatures of the functions that you may call:
<tools>
{% for tool in tools %}{{ (tool.function if 'function' in tool else tool) | tojson(ensure_ascii=False) }}
{% endfor %}</tools>

A call: <tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>
{%- endif %}
{%- set effort = reasoning_effort if reasoning_effort is defined and reasoning_effort else 'max' -%}
<|system|>Reasoning Effort: {{ effort | capitalize }}
{%- macro text(content) -%}
{%- if content is string %}{{ content }}
{%- else %}{% for part in content or [] %}{{ part.text }}{% endfor %}{% endif -%}
{%- endmacro -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
<|assistant|><think>{{ m.reasoning_content or '' }}</think>{{ text(m.content) }}
{%- for call in m.tool_calls or [] -%}
{%- set tc = call.function -%}
{{ '<tool_call>' ~ tc.name }}
{%- for key, value in tc.arguments.items() -%}
<arg_key>{{ key }}</arg_key><arg_value>
{{- value if value is string else value | tojson(ensure_ascii=False) -}}
</arg_value>
{%- endfor -%}
</tool_call>
{%- endfor -%}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif -%}
<tool_response>{{ text(m.content) }}</tool_response>
{%- else -%}
<|{{ m.role }}|>{{ text(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|><think>{% endif -%}
"""


def chat_tokenizer(template: str = TEMPLATE) -> Any:
    """Build a byte-level tokenizer without merges whose first ids are those of the checkpoint's own."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    for token in (*GLM_SPECIAL_TOKENS, *MORE_TAGS, *MORE_SPECIAL):
        special = token not in (*TAGS, *MORE_TAGS)
        backend.add_tokens([AddedToken(token, special=special, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        chat_template=template,
        model_max_length=4096,
    )


def random_glm5_next_chat(path: Path, *, template: str = TEMPLATE, **options: Any) -> Path:
    """Write a random GLM-5.3-Flash that talks as the released one does."""
    random_glm5_next(path, **options)
    tokenizer = chat_tokenizer(template)
    tokenizer.save_pretrained(path)
    ends = tokenizer.convert_tokens_to_ids(list(ENDS))
    for name in ("config.json", "generation_config.json"):
        config = json.loads((path / name).read_text())
        for part in (config, config.get("text_config", config)):
            part["eos_token_id"] = ends
        (path / name).write_text(json.dumps(config, indent=2) + "\n")
    return path
