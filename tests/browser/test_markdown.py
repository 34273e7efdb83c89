"""Text of the model as Markdown, well-meant and hostile, as the page really draws it."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from potluck.testing.page_server import PageServer
from tests.browser.page_objects import PotluckPage


@pytest.fixture(scope="module")
def board(browser: Browser) -> Iterator[PotluckPage]:
    """One page for all these tests: texts go straight into the renderer that the chat uses."""
    with PageServer() as server:
        page = PotluckPage.open(browser, server.base_url)
        yield page
        page.close()


def draw(page: PotluckPage, text: str) -> tuple[str, float]:
    """The HTML that this text becomes, in the chat's log, and the milliseconds that took."""
    html, elapsed_ms = page.tab.evaluate(
        """async (text) => {
            const { renderMarkdown } = await import('/page/markdown.js');
            const box = document.createElement('div');
            box.className = 'markdown';
            document.getElementById('log').replaceChildren(box);
            const begun = performance.now();
            renderMarkdown(box, text);
            return [box.innerHTML, performance.now() - begun];
        }""",
        text,
    )
    return html, elapsed_ms


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# One\n\n### Three", "<h3>One</h3><h5>Three</h5>"),
        ("plain *em* **strong** ***both*** ~~gone~~ `code`", "plain <em>em</em> <strong>strong</strong>"),
        ("snake_case_name and 2 * 3 * 4", "<p>snake_case_name and 2 * 3 * 4</p>"),
        ("- one\n- two\n  - inner\n- three", "<ul><li>one</li><li>two<ul><li>inner</li></ul></li><li>three</li></ul>"),
        ("3. three\n4. four", '<ol start="3"><li>three</li><li>four</li></ol>'),
        ("> said\n> twice", "<blockquote><p>said<br>twice</p></blockquote>"),
        ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
        ("[text](https://example.org/a_(b))", 'href="https://example.org/a_(b)"'),
        ("see https://example.org/x.", 'href="https://example.org/x"'),
        ("| a | b |\n| --- | ---: |\n| 1 | 2 |", '<td class="align-left">1</td><td class="align-right">2</td>'),
        ("```python\nif a < b:\n    pass\n```\nafter", "if a &lt; b:\n    pass</code>"),
        ("- [x] done\n- [ ] to do", 'aria-label="to do"'),
    ],
)  # fmt: skip
def test_markdown_becomes_elements(board: PotluckPage, text: str, expected: str) -> None:
    assert expected in draw(board, text)[0]


def test_code_has_a_button_that_copies_it(board: PotluckPage) -> None:
    board.tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    draw(board, "```sh\necho one\necho two\n```")
    copy = board.part("log").get_by_role("button", name="Copy code")
    copy.click()
    expect(copy).to_contain_text("Copied")
    assert board.tab.evaluate("navigator.clipboard.readText()") == "echo one\necho two"


HOSTILE = """<script>window.pwned = 1</script>

<img src=x onerror="window.pwned = 2"> <svg onload=window.pwned=3> <iframe src="javascript:window.pwned=4"></iframe>

[click](javascript:window.pwned=5) [data](data:text/html,<script>window.pwned=6</script>) [mixed](JaVaScRiPt:window.pwned=7)

[tab](java\tscript:window.pwned=8) <javascript:window.pwned=9> ![picture](https://elsewhere.example/track.png)

```html"><script>window.pwned=10</script>
<script>window.pwned = 11</script>
```

| <b>a</b> | "onmouseover="window.pwned=12 |
| --- | --- |
| <style>*{display:none}</style> | [x](vbscript:msgbox) |
"""


def test_hostile_text_stays_text(page: PotluckPage, server: PageServer) -> None:
    """The whole way: out of the model's mouth, through the stream, onto the page."""
    server.script.answer = HOSTILE
    page.ask("<b>draw</b>")
    page.wait_until_answered()
    expect(page.part("question-text")).to_have_text("<b>draw</b>")
    assert page.tab.evaluate("window.pwned") is None
    assert page.answer_text.locator("script, img, svg:not(.icon), iframe, style, b").count() == 0
    hrefs = page.answer_text.locator("a").evaluate_all("links => links.map(link => link.href)")
    assert hrefs == ["https://elsewhere.example/track.png"]  # a picture is a link that nobody has followed
    expect(page.answer_text).to_contain_text("<script>window.pwned = 1</script>")
    expect(page.answer_text).to_contain_text("click")


@pytest.mark.parametrize(
    "text",
    [
        "| " + " | ".join("x" for _ in range(60)) + " |\n" + "| --- " * 60 + "|\n" + ("| y " * 60 + "|\n") * 900,
        "*a _b **c __d ~~e [f `g " * 3000,
        "[" * 20_000 + "](" * 5_000,
        "> " * 3000 + "deep",
        "\n".join("  " * depth + "- item" for depth in range(400)),
        "`" * 20_001,
        "a" * 100_000,
        "**" * 20_000,
    ],
    ids=["table", "delimiters", "brackets", "quotes", "lists", "ticks", "word", "stars"],
)  # fmt: skip
def test_huge_input_neither_hangs_nor_breaks_the_layout(board: PotluckPage, text: str) -> None:
    assert draw(board, text)[1] < 2000
    assert not board.has_sideways_scroll()


def test_streaming_keeps_the_elements_that_are_finished(board: PotluckPage) -> None:
    kept, html = board.tab.evaluate(
        """async () => {
            const { renderMarkdown } = await import('/page/markdown.js');
            const box = document.createElement('div');
            const text = 'First.\\n\\nSecond *one*.\\n\\n```js\\nlet a;\\nlet b;\\n```\\n\\n| a |\\n|---|\\n| 1 |\\n';
            let first = null, code = null, same = true;
            for (let end = 1; end <= text.length; end++) {
                renderMarkdown(box, text.slice(0, end));
                if (end > 10) { first ??= box.children[0]; same &&= first === box.children[0]; }
                const block = box.querySelector('.code-block');
                if (block && end > 40) { code ??= block; same &&= code === block; }
            }
            const whole = document.createElement('div');
            renderMarkdown(whole, text);
            return [same, box.innerHTML === whole.innerHTML];
        }"""
    )
    assert kept
    assert html
