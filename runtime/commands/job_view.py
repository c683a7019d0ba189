"""A job's record for a person."""

from typing import Any

import typer
from rich.text import Text

from stoker.runtime.commands.terminal import as_lines, json_text, moment, print_table, screen

ATTEMPT_COLUMNS = ("attempt", "worker", "started (UTC)", "ended (UTC)", "as", "error")


def print_job(job: dict[str, Any]) -> None:
    """What there is to say of it, a line for each; a function's traceback as its lines."""
    said = [(name, text) for name, text in fields_of(job).items() if text]
    names, texts = zip(*said, strict=True)
    screen().print(Text(as_lines(names, texts)), soft_wrap=True)
    if traceback := (job["error"] or {}).get("traceback"):
        screen().print(Text(f"\n{traceback.rstrip()}"), soft_wrap=True)
    if len(job["attempts"]) > 1:
        typer.echo()
        print_table(ATTEMPT_COLUMNS, [attempt_cells(each) for each in job["attempts"]], prose=("error",))
    if job["timeline"]:
        typer.echo(f"\nwhere its time went: stoker jobs timeline {job['id']}")


def fields_of(job: dict[str, Any]) -> dict[str, str]:
    """ "" for what isn't known, or doesn't apply."""
    began, ended = job["started_at"], job["finished_at"]
    return {
        "job": job["id"],
        "function": job["function"],
        "state": job["state"],
        "waits": job["wait_reason"] or "",
        "jobs before it": plain(job["queue_position"]),
        "starts in s": plain(job["eta_s"]),
        "attempt": f"{job['attempt']} of {job['max_attempts']}",
        "queued (UTC)": moment(job["enqueued_at"]),
        "started (UTC)": moment(began) if began else "",
        "ended (UTC)": moment(ended) if ended else "",
        "ran s": f"{ended - began:.3f}" if began and ended else "",
        "isolation": job["isolation"] or "",
        "usage": json_text(job["usage"]) if job["usage"] else "",
        "cost USD": f"{job['cost_usd']:.6f}" if job["cost_usd"] is not None else "",
        "webhook": job["webhook_url"] or "",
        "route": json_text(job["route"]) if job["route"] else "",
        "result": json_text(job["result"], ensure_ascii=False) if job["state"] == "succeeded" else "",
        "error": job["error"]["message"] if job["error"] else "",
    }


def plain(number: float | None) -> str:
    return "" if number is None else f"{number:g}"


def attempt_cells(each: dict[str, Any]) -> tuple[object, ...]:
    ended = moment(each["ended_at"]) if each["ended_at"] else ""
    return each["number"], each["worker"], moment(each["started_at"]), ended, each["ended"], each["error"] or ""
