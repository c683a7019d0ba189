"""A chatbot whose conversations share a long system prompt: it is computed once, then read from the prompt cache.

stoker deploy examples/assistant.py
python examples/assistant.py
"""

import os
import time
from pathlib import Path

import openai

import stoker

MODELS = os.environ.get("MODELS", (Path(__file__).parent.parent / ".stoker" / "store" / "models").as_uri())

app = stoker.App("helpdesk")
app.llm("assistant", weights=f"{MODELS}/smollm2", max_model_len=4096)

RULES = """Orders are sent on the working day after they were paid. Parcels within the country take two days, to the
neighbouring countries four, elsewhere ten. Whoever is not content sends the goods back within thirty days; the
refund is paid when they have arrived. Repairs are free for two years. We never ask for passwords or card numbers.
""".replace("\n", " ")
SYSTEM = "You are the friendly assistant of an online shop. Answer in one short sentence.\n" + "\n".join(
    f"Rule {number}, for customers of country {number}: {RULES}" for number in range(1, 6)
)
QUESTIONS = ["How long does a parcel take?", "Can I send the goods back?", "Do you repair my radio?"]


def ask(client: openai.OpenAI, question: str) -> tuple[str, float, int, int]:
    """The answer, seconds until its first word, and how many of the prompt's tokens were found in the cache."""
    asked, first, text, usage = time.monotonic(), 0.0, "", None
    stream = client.chat.completions.create(
        model="assistant",
        messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        piece = chunk.choices[0].delta.content if chunk.choices else ""
        first = first or (time.monotonic() - asked if piece else 0.0)
        text += piece or ""
        usage = chunk.usage or usage
    assert usage and usage.prompt_tokens_details
    return text, first, usage.prompt_tokens_details.cached_tokens or 0, usage.prompt_tokens


def main() -> None:
    url = os.environ.get("STOKER_URL", "http://127.0.0.1:8000")
    with openai.OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("STOKER_API_KEY", "none")) as client:
        for question in QUESTIONS:
            text, first, cached, prompt = ask(client, question)
            print(f"{question}\n  {text.strip()}\n  first word after {first:.2f} s, {cached} of {prompt} tokens cached")


if __name__ == "__main__":
    main()
