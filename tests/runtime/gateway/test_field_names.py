import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.runtime.gateway.embeddings import embedding_request
from stoker.runtime.gateway.errors import ApiError
from stoker.runtime.gateway.field_names import likeliest, one_slip
from stoker.runtime.gateway.response_schema import response_request
from stoker.runtime.gateway.schema import ChatRequest, chat_request, completion_request

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
# What real programs send along: OpenAI's own fields, vLLM's, and those of other vendors.
EXTRAS = re.findall(
    r"\w+",
    """user store service_tier safety_identifier prompt_cache_key prompt_cache_retention parallel_tool_calls
reasoning_effort verbosity prediction web_search_options modalities best_of min_tokens max_new_tokens stop_token_ids
guided_json guided_regex guided_choice skip_special_tokens spaces_between_special_tokens prompt_logprobs length_penalty
truncate_prompt_tokens add_generation_prompt continue_final_message echo add_special_tokens documents chat_template
chat_template_kwargs mm_processor_kwargs priority request_id return_tokens_as_token_ids top_a typical_p repeat_penalty
num_predict num_ctx keep_alive options format transforms route provider models plugins usage thinking enable_thinking
extra_body cache_control system num_beams do_sample details safe_prompt random_seed min_completion_tokens""",
)


@pytest.mark.parametrize("name", EXTRAS)
def test_vendors_extras_are_ignored(name: str) -> None:
    assert likeliest(name, ChatRequest.model_fields) is None


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("temprature", "temperature"),
        ("temperatures", "temperature"),
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("max-completion-tokens", "max_completion_tokens"),
        ("presense_penalty", "presence_penalty"),
        ("response_fromat", "response_format"),
        ("tool_choise", "tool_choice"),
    ],
)
def test_slips_are_refused_with_what_was_meant(wrong: str, right: str) -> None:
    with pytest.raises(ApiError, match=f"Unknown parameter: '{wrong}'. Did you mean '{right}'") as caught:
        chat_request({**CHAT, wrong: 1})
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unknown_parameter", wrong)
    assert chat_request({**CHAT, wrong: None, "something_else": 1})


def test_every_route_of_openais_looks_at_names() -> None:
    for parse, body in (
        (completion_request, {"model": "m", "prompt": "x", "max_tokns": 1}),
        (embedding_request, {"model": "m", "input": "x", "dimension": 1}),
        (response_request, {"model": "m", "input": "x", "instruction": "x"}),
    ):
        with pytest.raises(ApiError, match="Did you mean"):
            parse(body)


def test_a_body_of_nothing_but_unknown_fields_costs_little() -> None:
    """To look for what was meant by each of them would take minutes."""
    began = time.process_time()
    chat_request({**CHAT, **{f"unknown_{number}": 1 for number in range(100_000)}})
    assert time.process_time() - began < 5


@given(st.text("ab_", min_size=1, max_size=8), st.data())
def test_one_slip_is_one_edit(word: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(word) - 1))
    letter = data.draw(st.sampled_from("abc"))
    swapped = word[:place] + word[place + 1 : place + 2] + word[place] + word[place + 2 :]
    for slipped in (word[:place] + word[place + 1 :], word[:place] + letter + word[place:], swapped):
        assert one_slip(slipped, word)
    assert one_slip(word[:place] + letter + word[place + 1 :], word)
    assert not one_slip(word + "cc", word) and not one_slip("cc" + word, word)
