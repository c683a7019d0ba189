"""One model name for two models: order-status questions go to a small one, the rest to a large one, hard or long
requests always; and when the large one has too much to do, the small one helps out.

    stoker deploy examples/router.py
    python examples/router.py

(Both are the same small model here, so that it runs anywhere.)
"""

import os
from pathlib import Path

import openai

import stoker

MODELS = os.environ.get("MODELS", (Path(__file__).parent.parent / ".stoker" / "store" / "models").as_uri())

app = stoker.App("concierge")
app.llm("small", weights=f"{MODELS}/smollm2", max_model_len=2048)
app.llm("large", weights=f"{MODELS}/smollm2", max_model_len=2048)
app.embed("meaning", weights=f"{MODELS}/minilm", idle_timeout=600)

LOOK_UPS = (
    "Where is my order?",
    "Has my parcel been sent yet?",
    "When will the package arrive?",
    "What is the status of order 4711?",
    "Track my delivery please.",
)
TALK = (
    "Which of your laptops is good for editing photos?",
    "Hello, who are you?",
    "Tell me about the return policy.",
    "Can you recommend a present for my father?",
    "I am not happy with the headphones I bought.",
)

app.router(
    "concierge",
    routes=[
        stoker.Route("large", min_difficulty=0.35),
        stoker.Route("large", tools=True),
        stoker.Route("small", metadata={"kind": "order-status"}),
        stoker.Route("small", examples=LOOK_UPS),
        stoker.Route("large", examples=TALK),
    ],
    default="large",
    embed="meaning",
    min_score=0.6,
    fallbacks={"large": "small"},
    max_queued=50,
)

QUESTIONS = (
    "Did you ship my parcel?",
    "What would you recommend to a friend of good coffee?",
    "Compare the two machines step by step and explain the trade-offs. Why is one dearer?",
)


def main() -> None:
    url = os.environ.get("STOKER_URL", "http://127.0.0.1:8000")
    with openai.OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("STOKER_API_KEY", "none")) as client:
        for question in QUESTIONS:
            messages = [{"role": "user", "content": question}]
            answer = client.chat.completions.with_raw_response.create(
                model="concierge",
                messages=messages,  # type: ignore[arg-type]
                max_tokens=16,
                temperature=0,
            )
            print(f"{question}\n  {answer.headers['x-route']}")
            print(f"  {(answer.parse().choices[0].message.content or '').strip()}")


if __name__ == "__main__":
    main()
