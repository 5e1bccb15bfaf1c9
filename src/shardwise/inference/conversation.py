"""A conversation with a model: its history, its system message, and the base next to the tuned model."""

from collections.abc import Callable, Iterator

from shardwise.errors import JobError, printable
from shardwise.inference.model import Answer, LoadedModel, TooLongError
from shardwise.inference.sampling import Sampling

Note = Callable[[str], None]


class Conversation:
    """What was said, by whom, and how it goes on."""

    def __init__(
        self, model: LoadedModel, sampling: Sampling, *, system: str | None, compare: bool, note: Note
    ) -> None:
        """`system`: None is the run's own message. `note` gets what a person should know."""
        self._model, self._sampling, self._note = model, sampling, note
        self._system, self._compare, self._said = None, False, list[dict[str, str]]()
        if system is not None:
            self._set_system(system)
        elif model.system:
            self._system = model.system
        if compare:
            self._set_compare(True)

    def command(self, line: str) -> str:
        """Carry out a line that begins with `/`; return what to say about it."""
        word, _, rest = line.strip().partition(" ")
        if word == "/reset":
            self._said.clear()
            return "forgotten"
        if word == "/system":
            self._set_system(rest.strip())
            return f"system message: {printable(rest.strip()) or 'none'}"
        if word == "/base":
            self._set_compare(not self._compare)
            return "the base answers, too" if self._compare else "the base is silent"
        fix = "/reset, /system TEXT, /base or /exit"
        raise JobError(f"there is no command {word}", where="what you typed", fix=fix)

    def answers(self, asked: str) -> Iterator[tuple[str, Answer]]:
        """Each answer with its label: the base's, where it is compared, and the model's own."""
        ids = self._ids(asked)
        if self._compare:
            yield "base: ", self._model.stream(ids, self._sampling, base=True)
        yield "tuned: " if self._compare else "", self._model.stream(ids, self._sampling)

    def remember(self, asked: str, answer: str) -> None:
        """Both are heard from now on."""
        self._said += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]

    def _ids(self, asked: str) -> list[int]:
        """The prompt, without the oldest messages where they leave too little room for an answer."""
        if not self._model.has_template:
            return self._model.prompt(asked)
        first = [{"role": "system", "content": self._system}] if self._system else []
        last = {"role": "user", "content": asked}
        length, left_out = self._model.length, 0
        room = min(self._sampling.max_new_tokens, (length or 0) // 2)  # for the answer
        while True:
            try:
                ids = self._model.prompt([*first, *self._said, last])
                fits = length is None or len(ids) + room <= length
            except TooLongError:
                ids, fits = [], False
            if fits or not self._said:
                break
            del self._said[:2]
            left_out += 1
        if left_out:
            turns = "the oldest turn" if left_out == 1 else f"the {left_out} oldest turns"
            self._note(f"note: the model's length is {length} tokens: it no longer hears {turns}")
        return ids or self._model.prompt([*first, last])

    def _set_system(self, text: str) -> None:
        if not self._model.has_template:
            what = "this model has no chat template, so it hears no system message"
            raise JobError(what, where="the system message", fix="write it into the text to continue")
        self._system = text

    def _set_compare(self, compare: bool) -> None:
        if compare and self._model.peft is None:
            what = f"{self._model.name} has no adapter, so there is no base to compare with"
            raise JobError(what, where="--base", fix="`shardwise chat` with the base's own name talks to it")
        self._compare = compare
