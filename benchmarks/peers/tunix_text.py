"""What Tunix asks of a tokenizer and a chat template beside ids and texts, for both of its peers."""

from typing import Any


class SpecialIds:
    """Three ids that no text holds."""

    def dedup_bos_ids(self, ids: Any) -> Any:
        """Nothing to drop."""
        return ids

    def bos_id(self) -> int:
        """Of a character that no text holds."""
        return 1

    def eos_id(self) -> int:
        """Of another."""
        return 2

    def pad_id(self) -> int:
        """Of a third."""
        return 0


class JoinedChat:
    """Messages one after another, as `PlainChat` writes them."""

    assistant_token = ""

    def parse(
        self, messages: list[dict[str, str]], add_generation_prompt: bool = False, is_first_msg: bool = False
    ) -> str:
        """The text of a prompt."""
        return "".join(message["content"] for message in messages)

    def update_assistant_end_tokens(self, tokens: Any) -> tuple[Any, int]:
        """Nothing is put after a turn."""
        return tokens, 0
