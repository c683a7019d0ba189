"""A batch: a file with one request per document goes in, a file with the answers comes out, at the lowest priority.

stoker deploy examples/documents.py
python examples/documents.py            # or with a path, which gets the file of answers
"""

import json
import os
import sys
import time
from pathlib import Path

import openai

import stoker

MODELS = os.environ.get("MODELS", (Path(__file__).parent.parent / ".stoker" / "store" / "models").as_uri())

app = stoker.App("documents")
app.llm("reader", weights=f"{MODELS}/smollm2", max_model_len=2048)

DOCUMENTS = {
    "invoice-17": "Invoice 17. Two lamps, 80 euros. To be paid by the first of May.",
    "letter-4": "Dear Ms Costa, we confirm your appointment on Monday at ten.",
    "note-9": "The printer on the second floor is out of paper again.",
}


def request(name: str, text: str) -> str:
    """One line of the input file."""
    messages = [{"role": "user", "content": f"What kind of document is this? Answer briefly.\n\n{text}"}]
    body = {"model": "reader", "messages": messages, "temperature": 0, "max_tokens": 16}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body})


def run(client: openai.OpenAI, lines: list[str]) -> str:
    """The output file's content."""
    uploaded = client.files.create(file=("documents.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h")
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(1)
        batch = client.batches.retrieve(batch.id)
    if not batch.output_file_id:
        sys.exit(f"the batch has {batch.status}: {batch.errors}")
    return client.files.content(batch.output_file_id).text


def main(path: Path | None) -> None:
    url = os.environ.get("STOKER_URL", "http://127.0.0.1:8000")
    with openai.OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("STOKER_API_KEY", "none")) as client:
        answers = run(client, [request(name, text) for name, text in DOCUMENTS.items()])
    if path:
        path.write_text(answers)
    for line in map(json.loads, answers.splitlines()):
        print(f"{line['custom_id']}: {line['response']['body']['choices'][0]['message']['content'].strip()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
