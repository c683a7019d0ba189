"""A consumer of webhooks: it is called when a job has ended, and believes only what the deployment has signed.

    stoker deploy examples/sentiment.py
    python examples/webhook.py

`stoker up` needs STOKER_SECRET to sign with, and STOKER_WEBHOOK_ALLOW=127.0.0.0/8 because this consumer's address is
not a public one.
"""

import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from standardwebhooks import Webhook, WebhookVerificationError

import stoker


class Inbox(HTTPServer):
    """Listens on `port` of this machine; `events` by their ids, for an event may be sent more than once."""

    def __init__(self, port: int, secret: str) -> None:
        super().__init__(("127.0.0.1", port), Delivery)
        self.webhook = Webhook(secret)
        self.events: dict[str, Any] = {}
        self.arrived = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/jobs"


class Delivery(BaseHTTPRequestHandler):
    server: Inbox  # type: ignore[assignment]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        try:
            event = self.server.webhook.verify(body, {name.lower(): value for name, value in self.headers.items()})
        except WebhookVerificationError as error:
            self.answer(400, f"{error}\n".encode())
            return
        self.answer(204)
        self.server.events.setdefault(self.headers["webhook-id"], event)
        self.server.arrived.set()

    def answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def main(port: int) -> None:
    with stoker.Client() as client, Inbox(port, client.request("GET", "/v1/webhooks/secret")["secret"]) as inbox:
        threading.Thread(target=inbox.serve_forever, daemon=True).start()
        job = client.spawn("sentiment", "What a lovely phone!", webhook=inbox.url)
        if not inbox.arrived.wait(60):
            sys.exit(f"nobody told of {job.id} within a minute: {job.status()}")
        inbox.shutdown()
    for event in inbox.events.values():
        print(f"{event['type']}: {event['data']['id']} says {event['data']['result']['label']}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
