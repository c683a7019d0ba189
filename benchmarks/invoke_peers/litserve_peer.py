"""LitServe, one worker; it has no durable queue. python litserve_peer.py web REDIS PORT"""

import sys
from typing import Any

import litserve


class Noop(litserve.LitAPI):
    def setup(self, device: str) -> None:
        pass

    def decode_request(self, request: dict[str, Any], **kwargs: Any) -> int:
        return request["x"]

    def predict(self, x: int, **kwargs: Any) -> int:
        return x

    def encode_response(self, output: int, **kwargs: Any) -> dict[str, int]:
        return {"y": output}


if __name__ == "__main__":
    server = litserve.LitServer(Noop(api_path="/"), accelerator="cpu", workers_per_device=1)
    server.run(port=int(sys.argv[3]), generate_client_file=False, log_level="warning", access_log=False)
