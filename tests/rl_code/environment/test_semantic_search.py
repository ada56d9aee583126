"""semantic_search, in real sandboxes: what it finds, follows, shares, bounds and refuses."""

from __future__ import annotations

import dataclasses
import itertools
import time
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.environment.layers import folder as folder_layer
from rl_code.environment.layers.store import LayerStore
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.environment.sandbox.config import SandboxConfig
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.search import chunks, index
from rl_code.environment.search import library as library_module
from rl_code.environment.search.chunks import Parser, Piece, windows
from rl_code.environment.search.index import Index, make_chunks, words_of
from rl_code.environment.search.library import Library, NotReady
from rl_code.environment.servers.stream import StreamEnded
from rl_code.environment.tools.api import check, execute, find_tools
from rl_code.environment.tools.workspace import Workspace
from rl_code.text.lines import split_lines
from rl_code.types import Layer, ToolCall, World

CART = '''"""What a customer pays."""

from tax import add_vat

LIMIT = 3


def total_price(items):
    """Sum of the prices, with value added tax."""
    return add_vat(sum(item.price for item in items))


@dataclass
class Basket:
    def removeEmptyBoxes(self):
        pass
'''
FILES = {
    "cart.py": CART,
    "tax.py": "def add_vat(amount):\n    return amount * 1.19\n",
    "net/retry.py": "def fetch_again(url, times):\n    for _ in range(times):\n        yield get(url)\n",
    "README.md": "Shop\n====\n\nHow orders are shipped to other countries.\n",
    "data.bin": "\0total price",
}
TOOLS = find_tools(tuple(map(Named, ("semantic_search", "write_file", "terminal"))))
GRAMMARS = {".py": "tree_sitter_python"}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return LayerStore(tmp_path_factory.mktemp("layers"))


@pytest.fixture(scope="module")
def sandboxes(store):
    with SandboxPool(SandboxConfig(layers=str(store.folder))) as pool:
        yield pool


@pytest.fixture(scope="module")
def parser(sandboxes):
    made = Parser(sandboxes, GRAMMARS)
    yield made
    made.close()


@pytest.fixture
def workspace(task, sandboxes, limits):
    made = opened(task, sandboxes, limits, FILES)
    yield made
    made.close()


def opened(task, sandboxes, limits, files, world=None, verbose=False):
    task = dataclasses.replace(task, files=files, world=world)
    limits = dataclasses.replace(limits, command_s=60.0)
    return Workspace(task, sandboxes, limits, verbose=verbose)


def use(workspace, name="semantic_search", tools=TOOLS, **arguments):
    call = ToolCall(name, arguments)
    assert check(call, tools) == ""
    return execute(call, tools, workspace)


def first(workspace, question):
    return use(workspace, question=question).content.splitlines()[0]


def test_questions_in_words_find_their_functions(workspace):
    assert first(workspace, "sum of prices with tax") == "cart.py:8: def total_price(items):"
    assert first(workspace, "retry a request for a url several times").startswith("net/retry.py:1")
    assert first(workspace, "boxes") == "cart.py:13: @dataclass"
    assert first(workspace, "shipping abroad").startswith("README.md:1")
    assert first(workspace, "add_vat").startswith("tax.py:1")
    assert "data.bin" not in use(workspace, question="total price").content


def test_it_follows_edits_of_tools_and_commands(workspace):
    use(workspace, question="vat")
    use(workspace, "write_file", path="tax.py", content="def add_customs(x):\n    return x\n")
    assert first(workspace, "customs duty") == "tax.py:1: def add_customs(x):"
    use(workspace, "terminal", command="mkdir new; mv tax.py new/duty.py; rm -r net")
    assert first(workspace, "customs duty") == "new/duty.py:1: def add_customs(x):"
    found = use(workspace, question="retry a request for a url several times").content
    assert "net/retry.py" not in found


def test_a_verbose_answer_has_the_text(task, sandboxes, limits):
    workspace = opened(task, sandboxes, limits, {"a.py": "x = 1\n" * 500}, verbose=True)
    answer = use(workspace, question="x").content
    assert answer.startswith("a.py:1\nx = 1\n")
    assert len(answer) < 8100
    assert "[20 more lines]" in answer
    workspace.close()


def test_files_and_indexes_are_made_once_for_all_episodes(task, sandboxes, limits, monkeypatch):
    library = Library(sandboxes, GRAMMARS, 100)
    made = []
    monkeypatch.setattr(
        "rl_code.environment.search.library.make_chunks",
        lambda path, *rest: made.append(path) or make_chunks(path, *rest),
    )
    soon = time.monotonic() + 300
    one, other = (opened(task, sandboxes, limits, FILES) for _ in range(2))
    assert library.index(one, soon).index is library.index(other, soon).index
    assert sorted(made) == sorted(set(FILES) - {"data.bin"})
    one.write("tax.py", "x = 1\n")
    assert library.index(one, soon).index is not library.index(other, soon).index
    assert len(made) == len(FILES)  # one more than before
    one.write("tax.py", FILES["tax.py"])
    assert library.index(one, soon).index is library.index(other, soon).index
    library.close()


def test_the_files_of_a_world_and_what_became_of_them(task, sandboxes, limits, store, tmp_path):
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    world = World((Layer(folder_layer.build(store, tmp_path), "/workspace"),))
    workspace = opened(task, sandboxes, limits, {}, world)
    assert first(workspace, "retry a request for a url several times").startswith("net/retry.py:1")
    use(workspace, "terminal", command="rm -r net; echo 'def ship_abroad(): pass' > tax.py")
    assert (
        "net/retry.py"
        not in use(workspace, question="retry a request for a url several times").content
    )
    assert first(workspace, "ship_abroad").startswith("tax.py:1")
    workspace.close()


def test_one_that_is_out_of_time_goes_on_later(task, sandboxes, limits):
    library = Library(sandboxes, GRAMMARS, 100)
    workspace = opened(task, sandboxes, limits, FILES)
    with pytest.raises(NotReady, match="0 of 4 files are read"):
        library.index(workspace, time.monotonic() - 1)
    assert library.index(workspace, time.monotonic() + 300).index is not None
    library.close()


def test_the_files_of_a_world_are_read_on_where_the_time_was_up(
    task, sandboxes, limits, store, tmp_path, monkeypatch
):
    for i in range(40):
        (tmp_path / f"m{i:02}.py").write_text(f"def f{i}():\n    pass\n")
    world = World((Layer(folder_layer.build(store, tmp_path), "/workspace"),))
    workspace = opened(task, sandboxes, limits, {}, world)
    library = Library(sandboxes, GRAMMARS, 100)
    now = itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: next(now))
    monkeypatch.setattr("rl_code.environment.search.library.time", clock)
    with pytest.raises(NotReady, match="26 files are not read yet"):
        library.index(workspace, 14)
    with pytest.raises(NotReady, match=r"\d+ of 40 files are read"):
        library.index(workspace, 45)
    found = library.index(workspace, 1000)
    assert found.index is not None and found.left_out == 0
    library.close()
    workspace.close()


def test_what_there_is_no_room_for_is_said_and_what_a_grammar_reads_is_first(
    task, sandboxes, limits
):
    pages = {f"docs/page{i}.md": f"a page about prices {i}\n" for i in range(5)}
    files = pages | {"src/prices.py": "def discount_of_price(x):\n    return x\n"}
    workspace = opened(task, sandboxes, limits, files)
    tools = find_tools((Named("semantic_search", {"files": 3}),))
    call = ToolCall("semantic_search", {"question": "discount of price"})
    content = execute(call, tools, workspace).content
    assert content.startswith("src/prices.py:1")
    assert content.endswith("\n3 files not searched")
    workspace.close()


def test_a_search_waits_for_others_no_longer_than_its_time(task, sandboxes, limits):
    library = Library(sandboxes, GRAMMARS, 100)
    workspace = opened(task, sandboxes, limits, FILES)
    with library._lock, pytest.raises(NotReady, match="other searches are at work"):
        library.index(workspace, time.monotonic() + 0.01)
    assert library.index(workspace, time.monotonic() + 300).index is not None
    library.close()
    workspace.close()


def test_an_index_is_bounded_in_characters_and_pieces(
    task, sandboxes, limits, store, tmp_path, monkeypatch
):
    for i in range(9):
        (tmp_path / f"m{i}.txt").write_text(f"file number {i}\n" * 50)  # two pieces each
    world = World((Layer(folder_layer.build(store, tmp_path), "/workspace"),))
    monkeypatch.setattr(library_module, "_CHARACTERS", 3000)
    monkeypatch.setattr(library_module, "_CHUNKS", 5)
    library = Library(sandboxes, GRAMMARS, 100)
    workspace = opened(task, sandboxes, limits, {}, world)
    found = library.index(workspace, time.monotonic() + 300)
    assert found.left_out == 5 and len(found.index.chunks) == 5
    library.close()
    workspace.close()


def test_what_is_kept_is_bounded_in_bytes(task, sandboxes, limits, monkeypatch):
    for name in ("_FILES_BYTES", "_INDEXES_BYTES"):
        monkeypatch.setattr(library_module, name, 200_000)
    library = Library(sandboxes, GRAMMARS, 100)
    workspace = opened(task, sandboxes, limits, FILES)
    for version in range(6):
        workspace.write("big.txt", f"{version} is the version\n" * 2000)
        assert library.index(workspace, time.monotonic() + 300).index is not None
        kept = [index for index, _ in library._indexes._held.values()]
        assert sum(len(chunk.text) for index in kept for chunk in index.chunks) < 150_000
        files = [chunks for chunks, _ in library._files._held.values()]
        assert sum(len(chunk.text) for chunks in files for chunk in chunks) < 150_000
    assert len(library._indexes._held) == 1 < len(library._files._held)
    library.close()
    workspace.close()


def test_pieces_are_bounded_in_number_and_length():
    line = "f(); " * 200
    whole_line = [[1, 1, f"f{i}"] for i in range(200)]
    assert chunks._checked(whole_line[:2], line) == [Piece(1, 1, "f0"), Piece(1, 1, "f1")]
    assert chunks._checked(whole_line, line) == windows(line)
    lines = "x\n" * 3000
    assert chunks._checked([[n, n, ""] for n in range(1, 3001)], lines) == windows(lines)


def test_nothing_to_find(task, sandboxes, limits):
    workspace = opened(task, sandboxes, limits, {"a.py": "\n\n"})
    answer = use(workspace, question="x")
    assert (answer.ok, answer.content) == (False, "none")
    workspace.close()


def test_pieces_are_definitions_and_what_is_between(parser):
    assert parser.pieces("cart.py", CART) == [
        Piece(1, 5, ""),
        Piece(8, 10, "total_price"),
        Piece(13, 16, "Basket"),
    ]
    methods = "".join(f"    def m{i}(self):\n" + "        x\n" * 20 for i in range(4))
    long = f"class Long:\n    y = 1\n{methods}"
    assert [piece.name for piece in parser.pieces("a.py", long)] == [
        "Long",
        "Long",
        "Long.m0",
        "Long.m1",
        "Long.m2",
        "Long.m3",
    ]
    assert parser.pieces("a.txt", "a\n" * 50) == [Piece(1, 40, ""), Piece(41, 50, "")]


@given(st.text(max_size=300))
def test_any_text_is_cut_into_pieces_of_its_own(parser, text):
    text = text.encode("utf-8", "replace").decode()
    count = len(split_lines(text))
    for pieces in (parser.pieces("a.py", text), windows(text)):
        for piece in pieces:
            assert 1 <= piece.first <= piece.last
        found = make_chunks("a.py", text, pieces)
        assert all(chunk.first <= count for chunk in found)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_pieces_are_whole_where_a_text_holds_odd_signs(parser, end):
    """A form feed ends no line, so the ends of functions are not cut off."""
    lines = ["def alpha():", "    return '\x1c\u2028'", "", "\f", "def beta():", "    return 2", ""]
    text = end.join(lines)
    found = make_chunks("a.py", text, parser.pieces("a.py", text))
    assert [(chunk.name, chunk.first, chunk.last) for chunk in found if chunk.name] == [
        ("alpha", 1, 2),
        ("beta", 5, 6),
    ]
    assert found[-1].text == "def beta():\n    return 2"
    assert windows(text) == [Piece(1, 6, "")]


def test_a_parser_that_ends_or_lies_costs_only_its_pieces(sandboxes, monkeypatch):
    parser = Parser(sandboxes, GRAMMARS)
    assert len(parser.pieces("a.py", CART)) == 3
    parser._companion._programs.close()  # as if it had crashed
    assert parser.pieces("a.py", CART) == windows(CART)
    assert len(parser.pieces("a.py", CART)) == 3
    for lie in ([[5, 1, ""]], [[1, 99, ""]], [["1", 2, ""]], "no", [[3, 4, ""], [1, 2, ""]]):
        assert chunks._checked(lie, CART) in (windows(CART), [Piece(3, 4, "")])
    deep = "(" * 100_000
    assert parser.pieces("a.py", deep)  # in pieces or in windows, but at once
    parser.close()
    monkeypatch.setattr(parser, "_ask", lambda *_: (_ for _ in ()).throw(StreamEnded("late")))
    assert parser.pieces("a.py", CART) == windows(CART)


def test_words_of_names():
    assert words_of("add_vat(removeEmptyBoxes, HTTPServer2)") == [
        *("add", "vat", "add_vat"),
        *("remove", "empty", "boxes", "removeemptyboxes"),
        *("http", "server", "2", "httpserver2"),
    ]
    assert words_of("naïve Größe") == ["naïve", "größe"]


def test_equal_chunks_keep_their_order_and_unknown_words_do_no_harm():
    texts = {f"{i}.txt": "the same text\n" for i in range(5)}
    found = Index([c for path, t in texts.items() for c in make_chunks("", t, windows(t))])
    assert len(found.search("zzzz qqqq", 3)) == 3
    assert len(found.search("", 3)) == 3
    ranks = np.zeros(3)
    index._add_ranks(ranks, np.array([1.0, 3.0, 3.0], np.float32), np.array([True, True, False]))
    assert ranks.tolist() == [1 / 62, 1 / 61, 0]


def test_what_it_finds_can_be_a_document():
    assert TOOLS["semantic_search"].documents
    call = ToolCall("semantic_search", {"question": "a b\nc"})
    compact = PROTOCOLS["compact"]
    message = compact.message([call], TOOLS)
    assert message == "<|call|>find\na b\nc<|end|><|eot|>"
    assert compact.parse(message.removesuffix("<|eot|>"), None, TOOLS) == [call]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"most": 0}, "most"),
        ({"files": 0}, "files"),
        ({"seconds": 100.0}, "seconds"),
        ({"grammars": {"py": "tree_sitter_python"}}, "must be an ending"),
        ({"grammars": {".x": "tree_sitter_nowhere"}}, "pip install tree-sitter-nowhere"),
    ],
)
def test_settings_that_cannot_be(settings, why):
    with pytest.raises(ConfigError, match=why):
        find_tools((Named("semantic_search", settings),))


def test_the_parser_is_a_program_of_its_own():
    text = Path(chunks.parse.__file__).read_text()
    assert "rl_code" not in text  # the sandbox shows it alone
