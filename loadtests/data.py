"""A data set as agents leave it, from a seed: the same seed, the same memories.

Sizes are those of the notes in `quality/notes.jsonl` (half below 170
characters, one in twenty above 390); tenants and a tenant's namespaces are
Zipf-like; about a third is not English.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

SIZES: Final = {"1k": 1_000, "10k": 10_000, "100k": 100_000}
#: Characters: of exp(N(ln median, sigma)).
MEDIAN_CHARS: Final = 170
SIGMA: Final = 0.5
MAX_CHARS: Final = 2_000
NAMESPACES: Final = 8
#: Exponent of the Zipf law, for tenants, namespaces and topics alike.
ZIPF: Final = 1.0
TYPES: Final = {
    "fact": 30, "decision": 20, "gotcha": 20, "preference": 8, "insight": 8, "code": 8, "event": 4, "goal": 2,
}  # fmt: skip
LANGUAGES: Final = {"en": 68, "de": 8, "fr": 6, "es": 6, "zh": 6, "ja": 4, "ru": 2}

_COMPONENTS: Final = (
    "worker", "scheduler", "API gateway", "billing service", "search index", "cache", "message queue", "login page",
    "session store", "migration", "backup job", "rate limiter", "webhook", "image pipeline", "feature flag",
    "CI runner",
)  # fmt: skip
_SUBJECTS: Final = (
    "timeout", "connection pool", "retry", "lock", "schema", "token", "encoding", "time zone", "pagination",
    "memory limit", "certificate", "dead letter", "index", "transaction", "deadlock", "checksum", "cursor", "header",
)  # fmt: skip
#: Of each language: openings with {c}omponent and {s}ubject, and clauses that follow until the size is reached.
_PHRASES: Final[dict[str, tuple[Sequence[str], Sequence[str]]]] = {
    "en": (
        ("The {c} needs another {s} than the default.", "We decided to move the {s} into the {c}.",
         "Watch out: the {s} of the {c} is shared by all tests.", "When the {c} restarts, its {s} is lost."),
        ("It failed twice in production because nobody looked at the log.",
         "The old value was copied from a blog post.",
         "Changing it back brings the flaky test back within a day.",
         "Ask before you raise it, since the vendor bills it.",
         "The fix is one line, but the reason took us a week.", "See the runbook for how to check it by hand."),
    ),
    "de": (
        ("Der {c} braucht einen anderen Wert für {s}.", "Vorsicht: {s} gilt im {c} für alle Mandanten zugleich."),
        ("Beim letzten Ausfall hat das niemand bemerkt.", "Der Grund steht im Protokoll der Besprechung.",
         "Erst nach dem Neustart wird die Änderung wirksam.", "Die Zeitüberschreitung war viel zu kurz gewählt."),
    ),
    "fr": (
        ("Le {c} exige un réglage particulier pour {s}.", "Attention, {s} est partagé par tout le {c}."),
        ("Personne ne l’avait remarqué avant la panne.", "La valeur par défaut est trop basse en production.",
         "Il faut redémarrer pour que le changement soit pris en compte."),
    ),
    "es": (
        ("El {c} necesita otro valor para {s}.", "Cuidado: {s} se comparte en todo el {c}."),
        ("Nadie lo notó hasta la caída del servicio.", "El valor predeterminado es demasiado bajo.",
         "Hay que reiniciar para que el cambio tenga efecto."),
    ),
    "zh": (
        ("{c} 的 {s} 不能使用默认值。", "注意：{c} 重启以后 {s} 会丢失。"),
        ("上次故障就是这个原因造成的。", "修改之前请先看运行手册。", "这个值是测量得出的，不要随便改。"),
    ),
    "ja": (
        ("{c} の {s} は既定値のままでは足りません。", "注意：{c} を再起動すると {s} が失われます。"),
        ("前回の障害の原因はこれでした。", "変更する前に手順書を確認してください。",
         "この値は測定して決めたものです。"),
    ),
    "ru": (
        ("Для {c} нужно другое значение {s}.", "Осторожно: {s} теряется при перезапуске {c}."),
        ("В прошлый раз это вызвало сбой.", "Перед изменением прочитайте инструкцию.", "Значение было измерено."),
    ),
}  # fmt: skip
#: Every memory is about one of these; queries ask for them.
TOPICS: Final = tuple(itertools.product(_COMPONENTS, _SUBJECTS))


@dataclass(frozen=True, slots=True)
class Item:
    """One memory: whose, what it is about (an index into TOPICS), and the body of the request that saves it."""

    tenant: int
    topic: int
    memory: dict[str, Any]


def zipf(count: int) -> list[float]:
    """Weights of `count` ranks."""
    return [1 / rank**ZIPF for rank in range(1, count + 1)]


def topic_text(topic: int) -> str:
    component, subject = TOPICS[topic]
    return f"{subject} of the {component}"


class Generator:
    """Memories and queries; `prefix` begins the name of every namespace, so that a purge finds them."""

    def __init__(self, seed: int | str, prefix: str, tenants: int = 1) -> None:
        self._dice = random.Random(seed)
        self._namespaces = [f"{prefix}-{i}" for i in range(NAMESPACES)]
        self._tenants, self._tenant_weights = range(tenants), zipf(tenants)
        self._namespace_weights = zipf(NAMESPACES)
        # which topic is the most popular one is chance, too
        self._topics = self._dice.sample(range(len(TOPICS)), len(TOPICS))
        self._topic_weights = list(itertools.accumulate(zipf(len(TOPICS))))
        self._serial = itertools.count()

    def items(self, count: int) -> Iterator[Item]:
        return (self.item() for _ in range(count))

    def tenant(self) -> int:
        """Whose turn it is."""
        return self._dice.choices(self._tenants, self._tenant_weights)[0]

    def item(self) -> Item:
        return Item(self.tenant(), topic := self._topic(), self._memory(topic))

    def query(self) -> str:
        """As an agent asks: a question, a few words, an error's text, or another language."""
        component, subject = TOPICS[self._topic()]
        language = self._choice(LANGUAGES)
        if language != "en":
            return self._dice.choice(_PHRASES[language][0]).format(c=component, s=subject)
        return self._dice.choice((
            "why does the {c} lose its {s}?", "{c} {s}", "{s} of the {c}, default value",
            "error in {c}: {s} ERR_{n}", "what did we decide about the {s} in the {c}?",
        )).format(c=component, s=subject, n=self._dice.randrange(10_000))  # fmt: skip

    def _memory(self, topic: int) -> dict[str, Any]:
        dice, kind = self._dice, self._choice(TYPES)
        component, subject = TOPICS[topic]
        content = self._code(component, subject) if kind == "code" else self._prose(component, subject)
        memory: dict[str, Any] = {
            "content": content,
            "namespace": dice.choices(self._namespaces, self._namespace_weights)[0],
            "type": kind,
            "tags": sorted({component.split()[0].lower(), subject.split()[-1]}),
            "importance": round(dice.betavariate(4, 4), 2),
            "source": dice.choice(("claude-code", "cursor", "hook", "cli")),
        }
        if dice.random() < 0.4:
            memory["title"] = f"{subject} in the {component}"
        if dice.random() < 0.25:
            memory["facts"] = [f"{subject} was {dice.randrange(1, 500)} before"]
        if dice.random() < 0.3:
            memory["entities"] = [f"{component.split()[0].lower()}.py"]
        return memory

    def _prose(self, component: str, subject: str) -> str:
        size = min(MAX_CHARS, self._dice.lognormvariate(0, SIGMA) * MEDIAN_CHARS)
        openings, clauses = _PHRASES[self._choice(LANGUAGES)]
        # a number in each, so that no two contents are the same
        text = f"{self._dice.choice(openings).format(c=component, s=subject)} ERR_{next(self._serial)}"
        while len(text) < size:
            text = f"{text} {self._dice.choice(clauses)}"
        return text

    def _code(self, component: str, subject: str) -> str:
        name = f"{component}_{subject}".lower().replace(" ", "_")
        number = next(self._serial)
        return (
            f"src/{component.split()[0].lower()}/{name}.py:{self._dice.randrange(1, 900)}\n"
            f"def {name}_{number}(self, attempts: int = {self._dice.randrange(1, 9)}) -> None:\n"
            f"    Checks the {subject} before the {component} starts."
        )

    def _topic(self) -> int:
        return self._dice.choices(self._topics, cum_weights=self._topic_weights)[0]

    def _choice(self, weights: dict[str, int]) -> str:
        return self._dice.choices(list(weights), list(weights.values()))[0]
