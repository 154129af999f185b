"""Chat templates: messages to text, as the model's authors wrote it in Jinja.

Knows Jinja and the names that Hugging Face templates expect. Does not know token ids.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from trouper.channels import ChatError

CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

RAW = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

# A prompt is a pure function of its task: templates that print today's date get the one that Llama 3.2's template
# falls back to, today and after a resume.
_DATE = datetime.date(2024, 7, 26)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for supervised masks; here it only prints its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Template:
    """A compiled chat template.

    Args:
        source: Jinja text.
        special: names the template may use, such as `bos_token`.
        origin: where it came from, for messages.

    Raises:
        ChatError: it does not compile.
    """

    def __init__(self, source: str, special: Mapping[str, str], origin: str) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _DATE.strftime
        self.origin = origin
        self._special = dict(special)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatError(f"the chat template of {origin} does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        generate: bool,
    ) -> str:
        """The conversation as text.

        Args:
            messages: dicts with `role` and `content`.
            tools: schemas shown to the model; nothing where empty.
            generate: end with the opening of an assistant message.

        Raises:
            ChatError: the template refused the messages.
        """
        try:
            return self._template.render(
                self._special, messages=messages, tools=list(tools) or None, add_generation_prompt=generate
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ChatError(f"the chat template of {self.origin} cannot render the roles {roles}: {error}") from error


def _tojson(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML characters, which no model was trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
