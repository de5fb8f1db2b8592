"""Words that make a reader stop: in names, comments, messages, help texts and documents."""

import io
import re
import tokenize

import pytest
from conftest import ROOT
from test_layout import LIMITS

# Patterns that no text has, and what to write instead.
PHRASES = {
    r"what you type wins|what is typed wins": "options on the command line take precedence",
    r"who reaches": "anyone who can reach",
    r"(?:one|a) sentence": "one line, an error message",
    r"roll call": "pre-flight check",
    r"meeting point": "rendezvous",
    r"the same line|that line again": "the same command",
    r"as if nothing were": "continue unaffected",
    r"that are namespaces": "simulated nodes",
    r"sign of life": "heartbeat",
    r"made of whatever|by whatever": "if it is interrupted",
    r"of all kinds": "say which",
    r"now and then": "how often",
    r"is gone:": "was removed:",
    # Clauses without a head, and prepositions in place of verbs.
    r"those that were not given": "options that were omitted",
    r"what a run (?:leaves|left|has left)": "files in a run directory",
    r"is said by|as said by": "reports",
    r"as from": "read from",
    r"refused by name": "rejected; the error names it",
    # Programs are not persons.
    r"(?:process|node|run|script|program|launcher|worker|rank|driver)(?:es|s)? "
    r"(?:knows?|tells?|speaks?|hears?|wants?|thinks?|believes?)": "a node joins, a run resumes",
    # Words that only this project used.
    r"wanted": "requested",
    r"told": "reported",
    r"mended": "fixed",
    r"alike": "on every rank, equal",
    r"arms?": "study run",
    r"untyped": "defaulted",
    r"played": "simulated",
    r"go(?:es|ing)? on": "continues",
}
# Names that say nothing: name the thing.
NAMES = {"found", "wanted", "told", "mended", "alike", "arm", "arms", "untyped", "played", "room"}
NAMES |= {"fault", "faults", "goes_on", "end_with", "go_on_without_reader", "of_shortage"}
NAMES |= {"from_main", "lowered", "unlike", "refuse_gone", "mildest", "understood", "held", "Arm"}
WORDS_OF_A_SENTENCE = 45

FILES = [*ROOT.glob("*.py"), *ROOT.glob("*.md")]
FILES += [path for folder in ("utils", "scripts") for path in (ROOT / folder).rglob("*.*")]
FILES = [path for path in FILES if path.suffix in (".py", ".md", ".sh", ".sbatch", ".txt", ".c")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_text_and_names_use_ordinary_words(path):
    """Except outputs of earlier versions, in a document's blocks of text."""

    def blank(block: re.Match) -> str:
        return "\n" * block[0].count("\n")

    text = re.sub(r"```text\n.*?```", blank, path.read_text(), flags=re.DOTALL)
    problems = []
    for pattern, better in PHRASES.items():
        words = pattern.replace(" ", r"\s+")
        for match in re.finditer(rf"\b(?:{words})(?!\w)", text, re.IGNORECASE):
            number = text.count("\n", 0, match.start()) + 1
            problems.append(f"{path}:{number}: {match[0]} -> {better}")
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME and token.string in NAMES:
                problems.append(f"{path}:{token.start[0]}: the name {token.string}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("document", LIMITS)
def test_sentences_of_documents_are_short(document):
    text = re.sub(r"```.*?```", "\n\n", (ROOT / document).read_text(), flags=re.DOTALL)
    text = "\n".join(line for line in text.splitlines() if line[:1] not in ("|", "#"))
    for paragraph in re.split(r"\n\s*\n|\n- |\n\d+\. ", text):
        for sentence in re.split(r"(?<=[.!?:;])\s+", paragraph):
            assert len(sentence.split()) <= WORDS_OF_A_SENTENCE, sentence
