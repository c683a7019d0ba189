"""Templates that would never end, and the blocks beside them."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from stoker.runtime.gateway import chat_template
from stoker.runtime.gateway.chat_template import ChatTemplate, TemplateRefused
from stoker.runtime.gateway.time_limit import TimeUp, Watch

SPIN = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_that_spins_is_refused_while_others_render(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_S", 0.3)
    spinning, plain = ChatTemplate(SPIN, {}), ChatTemplate("{{ messages[0].content }}", {})
    began = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        refused = [pool.submit(spinning.render, []) for _ in range(2)]
        assert [pool.submit(plain.render, [{"content": str(n)}]).result(10) for n in range(50)] == list(
            map(str, range(50))
        )
        for future in refused:
            with pytest.raises(TemplateRefused, match="longer than 0.3 s"):
                future.result(20)
        assert pool.submit(plain.render, [{"content": "after"}]).result(5) == "after"
    assert time.monotonic() - began < 15


def test_what_ends_in_time_is_never_interrupted() -> None:
    watch = Watch()
    for _ in range(20):
        with watch.limited(1):
            time.sleep(0.01)
    time.sleep(1.2)
    with pytest.raises(TimeUp), watch.limited(0.05):
        while True:
            time.sleep(0.01)
    time.sleep(0.3)
    assert sum(thread.name == "time limit" for thread in threading.enumerate()) <= 2
