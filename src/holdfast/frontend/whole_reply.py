"""An answer that is not streamed: one JSON body, once every choice has reached its end.

Fields that clients of OpenAI or vLLM read without asking are there, as null where there is nothing to say.
"""

from __future__ import annotations

from typing import Any

from holdfast.frontend.choice import Choice
from holdfast.frontend.reply import Reply
from holdfast.frontend.shapes import encode, end_of
from holdfast.streams.states import Waiting

# What a message of ours never has, and a body.
_SILENT: dict[str, Any] = {
    "refusal": None,
    "annotations": None,
    "audio": None,
    "function_call": None,
    "tool_calls": [],
    "reasoning": None,
}
_NO_MORE: dict[str, Any] = {"service_tier": None, "system_fingerprint": None, "kv_transfer_params": None}


class WholeReply(Reply):
    """One JSON body at the end."""

    def add(self, choice: Choice) -> None:
        self.choices.append(choice)

    def flush_choice(self, choice: Choice) -> None:
        if self.outcome:
            return
        self._first_output()
        if self._all_finished():
            self.connection.respond(200, encode(self._body()))
            self._end("success")

    def still_waiting(self, waiting: Waiting) -> None:
        """Nothing to keep warm: no header has gone out."""

    def _body(self) -> dict[str, Any]:
        shape = self.shape
        body: dict[str, Any] = {
            "id": shape.response_id,
            "object": "chat.completion" if shape.chat else "text_completion",
            "created": shape.created,
            "model": shape.model,
            "choices": [self._choice(choice) for choice in self.choices],
            "usage": self._usage(),
            "holdfast": self._holdfast(self.choices),
        }
        if shape.chat:
            body |= {"prompt_logprobs": None, "prompt_token_ids": self._prompt_ids(self.choices[0])}
        return body | _NO_MORE

    def _choice(self, choice: Choice) -> dict[str, Any]:
        ids = choice.token_ids if choice.keep_ids else None
        end = end_of(choice, self._logprobs(choice), ids)
        if self.shape.chat:
            return {"index": choice.index, "message": {"role": "assistant", "content": choice.text} | _SILENT} | end
        prompt = {"prompt_logprobs": None, "prompt_token_ids": self._prompt_ids(choice)}
        return {"index": choice.index, "text": choice.text} | end | prompt
