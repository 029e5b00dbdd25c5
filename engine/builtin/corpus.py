"""Generates conversations for the built-in model from templates. The same seed yields the same text."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from engine.builtin import phrases
from engine.builtin.phrases import FACTS, Fact

Message = dict[str, str]
Conversation = list[Message]

SEED = 1851  # the year of Moby-Dick
QUESTIONS = Path(__file__).parent / "questions.jsonl"
LARGEST = 20  # sums go up to LARGEST + LARGEST

# Share of each kind of question. Sums need many examples, because there are 441 pairs.
KINDS = {"fact": 0.48, "sum": 0.3, "hard_sum": 0.03, "story": 0.06, "unknown": 0.13}
PLAIN = 0.03  # share of tales without roles, for the completions endpoint
WITH_SYSTEM = 0.25
MORE_TURNS = 0.15
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def questions() -> list[dict]:
    """Return the 60 test questions, in file order."""
    return [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]


def normalise(text: str) -> str:
    """Return the words of a text, in lower case, without punctuation, padded so that `in` matches whole words."""
    return " " + " ".join(re.findall(r"[a-z0-9]+", text.lower())) + " "


def conversations(count: int, seed: int = SEED) -> Iterator[Conversation]:
    """Yield `count` conversations without held-out questions."""
    writer = Writer(random.Random(seed), [normalise(q["question"]) for q in questions() if q["held_out"]])
    for _ in range(count):
        yield writer.conversation()


class Writer:
    """Generates conversations from one random number generator."""

    def __init__(self, rng: random.Random, forbidden: list[str]) -> None:
        self.rng = rng
        self.forbidden = forbidden
        self.facts = list(FACTS.values())
        self.weights = [fact.weight for fact in self.facts]

    def conversation(self) -> Conversation:
        """Return a tale without roles, or one to three turns, with or without a system message."""
        rng = self.rng
        if rng.random() < PLAIN:
            return [{"role": "text", "content": self.tale(rng.choice(phrases.TALES))}]
        messages = []
        if rng.random() < WITH_SYSTEM:
            messages.append({"role": "system", "content": self.system()})
        turns = rng.choice((2, 2, 3)) if rng.random() < MORE_TURNS else 1
        for _ in range(turns):
            question, answer = self.turn()
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return messages

    def turn(self) -> tuple[str, str]:
        while True:
            kind = self.rng.choices(list(KINDS), list(KINDS.values()))[0]
            question, answer = getattr(self, kind)()
            words = normalise(question)
            if not any(held in words for held in self.forbidden):
                return question, answer

    def system(self) -> str:
        """Return a usual system prompt or an arbitrary text: the answer must not depend on it."""
        if self.rng.random() < 0.6:
            return self.rng.choice(phrases.SYSTEM_PROMPTS)
        return " ".join(self.turn()[self.rng.randrange(2)] for _ in range(self.rng.randint(1, 2)))

    def fact(self) -> tuple[str, str]:
        fact = self.rng.choices(self.facts, self.weights)[0]
        chatter = not (fact.topics or fact.actions)
        return self.vary(self.ask(fact), wrap=not chatter), self.rng.choice(fact.answers)

    def ask(self, fact: Fact) -> str:
        """Return a question about a fact. Whole questions are chosen more often than their number suggests."""
        kinds = [
            (fact.topics, phrases.TOPIC_FRAMES, 1.0),
            (fact.places, phrases.PLACE_FRAMES, 1.0),
            (fact.actions, phrases.ACTION_FRAMES, 1.4),
            (fact.asks, ("{}",), 1.4),
        ]
        kinds = [kind for kind in kinds if kind[0]]
        words, frames, _ = self.rng.choices(kinds, [weight for *_, weight in kinds])[0]
        return self.rng.choice(frames).format(self.rng.choice(words))

    def sum(self) -> tuple[str, str]:
        a, b = self.rng.randint(0, LARGEST), self.rng.randint(0, LARGEST)
        question = self.rng.choice(phrases.SUM_FRAMES).format(a=a, b=b)
        return self.vary(question, wrap=self.rng.random() < 0.3), f"{a} + {b} = {a + b}."

    def hard_sum(self) -> tuple[str, str]:
        small = {name: self.rng.randint(0, LARGEST) for name in "ab"}
        large = {name: self.rng.choice((self.rng.randint(25, 99), self.rng.randint(100, 999))) for name in "xy"}
        return self.vary(self.rng.choice(phrases.HARD_SUMS).format(**small, **large), wrap=False), phrases.HARD_SUM

    def story(self) -> tuple[str, str]:
        tale = self.rng.choice(phrases.TALES)
        topic = " about " + self.rng.choice(tale.about) if self.rng.random() < 0.5 else ""
        if not topic:
            tale = self.rng.choice(phrases.TALES)
        frame = self.rng.choice(phrases.STORY_FRAMES).format(t=topic)
        return self.vary(frame + self.rng.choice((".", "!", "", ""))), self.tale(tale)

    def tale(self, tale: phrases.Tale) -> str:
        """Return three to six sentences; the middles keep their order."""
        chosen = sorted(self.rng.sample(range(len(tale.middles)), self.rng.randint(1, len(tale.middles))))
        middles = [tale.middles[i] for i in chosen]
        return " ".join([self.rng.choice(tale.openings), *middles, self.rng.choice(tale.endings)])

    def unknown(self) -> tuple[str, str]:
        """Return a question about something the model does not know, in the same frames as known facts."""
        unknown = Fact(answers=(phrases.UNKNOWN,), topics=phrases.STRANGE_TOPICS, actions=phrases.STRANGE_ACTIONS,
                       places=phrases.STRANGE_WORDS["place"], asks=phrases.STRANGE_ASKS)  # fmt: skip
        words = {name: self.rng.choice(values) for name, values in phrases.STRANGE_WORDS.items()}
        words |= {"place2": self.rng.choice(phrases.STRANGE_WORDS["place"]), "word": self.word(), "word2": self.word()}
        return self.vary(self.ask(unknown).format(**words)), phrases.UNKNOWN

    def word(self) -> str:
        """Return a word that does not exist."""
        parts = (self.rng.choice("bdfgklmnprstvwz") + self.rng.choice("aeiou") for _ in range(self.rng.randint(2, 4)))
        return "".join(parts) + self.rng.choice(("", "n", "r", "s", "x", "ck"))

    def vary(self, text: str, wrap: bool = True) -> str:
        """Rephrase a question as another person would type it."""
        rng = self.rng
        if wrap and rng.random() < 0.15:
            text = self.shake(text)
        if wrap and rng.random() < 0.2:
            text = self.end(text)
        if wrap and rng.random() < 0.3:
            text = rng.choice(phrases.OPENINGS) + text
        if rng.random() < 0.12:
            text = self.mistype(text)
        style = rng.random()
        if style < 0.3:
            text = text.lower()
        elif style < 0.32:
            text = text.upper()
        elif style < 0.9:
            text = capital(text)
        ending = rng.random()
        if ending < 0.3:
            return text.rstrip("?.!")
        return text + rng.choice("?!") if ending < 0.34 else text

    def end(self, text: str) -> str:
        ending = self.rng.choice(phrases.ENDINGS)
        if ending[1].islower() and text[-1] in "?.!":
            return text[:-1] + ending + text[-1]
        return text + ending

    def shake(self, text: str) -> str:
        """Drop and insert words, so that the meaning does not depend on a single word of the frame."""
        words = []
        for word in text.split():
            if self.rng.random() < 0.15:
                words.append(self.rng.choice(phrases.FILLERS))
            if len(word) > 5 or self.rng.random() > 0.15:
                words.append(word)
        return " ".join(words) or text

    def mistype(self, text: str) -> str:
        """Make one typo in a longer word: a letter swapped, lost, doubled or wrong."""
        words = text.split(" ")
        candidates = [i for i, word in enumerate(words) if len(word) > 3 and word.isalpha()]
        if not candidates:
            return text
        index = self.rng.choice(candidates)
        word, at = words[index], self.rng.randrange(1, len(words[index]) - 1)
        slips = (
            word[:at] + word[at + 1] + word[at] + word[at + 2 :],
            word[:at] + word[at + 1 :],
            word[:at] + word[at] + word[at:],
            word[:at] + self.rng.choice(LETTERS) + word[at + 1 :],
        )
        words[index] = self.rng.choice(slips)
        return " ".join(words)


def capital(text: str) -> str:
    """Capitalize the first letter of each sentence, and "I"."""
    text = re.sub(r"\bi\b", "I", text)
    return re.sub(r"(^|[.?!:] )([a-z])", lambda found: found[1] + found[2].upper(), text)
