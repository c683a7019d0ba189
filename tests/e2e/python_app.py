"""An app with each kind of Python function, as its user would write it; the end-to-end test deploys it."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import BaseModel, field_validator

import stoker

app = stoker.App("kinds")


class Order(BaseModel):
    sku: str
    count: int = 1

    @field_validator("sku")
    @classmethod
    def known(cls, sku: str) -> str:
        if sku == "unknown":
            raise ValueError("there is no such article")
        return sku


@dataclass
class Price:
    sku: str
    cents: int


@app.function()
def price(order: Order, currency: Literal["EUR", "USD"] = "EUR") -> Price:
    return Price(order.sku, order.count * (100 if currency == "EUR" else 110))


@app.function()
def half(image: np.ndarray) -> np.ndarray:
    return image / 2


@app.function()
def reverse(data: bytes) -> bytes:
    return data[::-1]


@app.function(batch=stoker.Batch(max_size=8, max_wait_ms=300))
def cents(orders: list[Order]) -> list:
    if any(order.sku == "poison" for order in orders):
        raise RuntimeError("the whole batch")
    return [KeyError(order.sku) if order.sku == "odd" else order.count for order in orders]


@app.cls(concurrency=4)
class Counter:
    @stoker.load
    async def prepare(self) -> None:
        self.lock = asyncio.Lock()
        self.loop = asyncio.get_running_loop()
        self.loads = getattr(self, "loads", 0) + 1
        self.calls = 0

    @stoker.method
    async def add(self, by: int) -> dict:
        async with self.lock:
            self.calls += by
        return {"calls": self.calls, "loads": self.loads, "same_loop": asyncio.get_running_loop() is self.loop}

    @stoker.method
    async def count(self, to: int):
        for number in range(to):
            await asyncio.sleep(0)
            yield number


@app.cls(batch=stoker.Batch(max_size=4, max_wait_ms=100))
class WordLength:
    @stoker.load
    def prepare(self) -> None:
        self.length = len

    @stoker.method
    def measure(self, words: list[str]) -> list[int]:
        return [self.length(word) for word in words]


@app.function(retries=0)
def loud(size: int) -> bytes:
    if size > 100_000_000:
        return bytes(size)
    raise ValueError("x" * size)


@app.cls(retries=0)
class Broken:
    @stoker.load
    def prepare(self) -> None:
        raise FileNotFoundError("weights.bin")

    @stoker.method
    def run(self, x: int) -> int:
        return x


@app.function()
def total(skus: list[str]) -> int:
    with stoker.Client() as client:
        return sum(client.invoke("price", {"order": {"sku": sku}})["cents"] for sku in skus)


@app.function()
async def nested(depth: int) -> int:
    async with stoker.AsyncClient() as client:
        return 1 + await client.invoke("nested", depth - 1) if depth else 0


@app.function(timeout=3)
def nested_in_a_thread(depth: int) -> int:
    with ThreadPoolExecutor(1) as pool:
        return 1 + pool.submit(stoker.Client().invoke, "nested_in_a_thread", depth - 1).result() if depth else 0


@app.function(secrets=["api-token"])
def token_length(_) -> int:
    return len(os.environ["API_TOKEN"])


@app.function()
def missing(_) -> None:
    import a_module_that_nobody_has  # type: ignore[import-not-found] # noqa: F401
