"""The eight tools: name, words for the agent, arguments, answer, and what each calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from mcp_types import Tool, ToolAnnotations
from pydantic import BaseModel, Field

from warmstart.mcp_server import forms
from warmstart.mcp_server.forms import Answer
from warmstart.mcp_server.schemas import input_schema, output_schema
from warmstart.memory import (
    Health,
    HistoryRequest,
    Memory,
    MemoryAPI,
    MemoryId,
    MemoryPatch,
    Namespaces,
    NewMemory,
    RecallRequest,
    Request,
    SearchRequest,
)


class Nothing(Request):
    """No arguments."""


class OneMemory(Request):
    id: MemoryId


class Get(OneMemory):
    history: bool = False


class Update(MemoryPatch):
    id: MemoryId

    def changes(self) -> dict[str, Any]:
        return {name: value for name, value in super().changes().items() if name != "id"}


class Delete(OneMemory):
    hard: bool = Field(False, description="Delete for good, past the trash.")


async def _save(api: MemoryAPI, request: NewMemory) -> Answer:
    return forms.saved(await api.save(request))


async def _search(api: MemoryAPI, request: SearchRequest) -> Answer:
    return forms.search(await api.search(request))


async def _recall(api: MemoryAPI, request: RecallRequest) -> Answer:
    return forms.page(await api.recall(request))


async def _get(api: MemoryAPI, request: Get) -> Answer:
    memory = await api.get(request.id)
    if not request.history:
        return forms.whole(memory)
    return forms.with_history(memory, await api.history(request.id, HistoryRequest(limit=forms.MAX_SHOWN_VERSIONS)))


async def _update(api: MemoryAPI, request: Update) -> Answer:
    return forms.updated(await api.update(request.id, MemoryPatch.model_validate(request.changes())))


async def _delete(api: MemoryAPI, request: Delete) -> Answer:
    await api.delete(request.id, hard=request.hard)
    return forms.deleted(request.id, request.hard)


async def _namespaces(api: MemoryAPI, request: Nothing) -> Answer:
    return forms.namespaces(await api.namespaces())


async def _health(api: MemoryAPI, request: Nothing) -> Answer:
    return forms.health(await api.health())


@dataclass(frozen=True)
class MemoryTool:
    """`told` are the fields of `answer` in the output schema; `known`: see `input_schema`."""

    name: str
    title: str
    description: str
    arguments: type[Request]
    answer: type[BaseModel]
    told: tuple[str, ...]
    run: Callable[[MemoryAPI, Any], Awaitable[Answer]]
    known: type[Request] | None = None
    writes: bool = False
    destructive: bool = False
    idempotent: bool = True

    def listed(self) -> Tool:
        return Tool(
            name=self.name,
            title=self.title,
            description=self.description,
            input_schema=input_schema(self.arguments, self.known),
            output_schema=output_schema(self.answer, self.told),
            # the defaults are destructive and open-world: each hint is said
            annotations=ToolAnnotations(
                read_only_hint=not self.writes,
                destructive_hint=self.destructive,
                idempotent_hint=self.idempotent,
                open_world_hint=False,
            ),
        )


TOOLS: Final = {
    tool.name: tool
    for tool in (
        MemoryTool(
            "memory_save",
            "Save a memory",
            "Remember one decision with its reason, gotcha, preference or fact. Saving it again is safe.",
            NewMemory, forms.SavedForm, ("id", "duplicate"), _save,
            writes=True,
        ),
        MemoryTool(
            "memory_search",
            "Search memories",
            "Find by meaning and words. Use at the start of a task, before a decision, on an error message.",
            SearchRequest, forms.SearchForm, ("hits", "mode", "degraded"), _search,
            known=NewMemory,
        ),
        MemoryTool(
            "memory_recall",
            "Browse memories",
            "Browse without a query, newest or most important first.",
            RecallRequest, forms.PageForm, ("memories", "next_cursor"), _recall,
            known=SearchRequest,
        ),
        MemoryTool(
            "memory_get",
            "Read a memory",
            "Read one memory whole.",
            Get, Memory, ("id", "namespace", "type", "title", "content", "facts"), _get,
        ),
        MemoryTool(
            "memory_update",
            "Correct a memory",
            "Correct a memory in place. Fields as in memory_save; those not given stay.",
            Update, forms.UpdatedForm, ("id", "updated_at"), _update,
            known=NewMemory, writes=True, destructive=True,
        ),
        MemoryTool(
            "memory_delete",
            "Delete a memory",
            "Put a wrong or outdated memory in the trash.",
            Delete, forms.DeletedForm, ("id", "hard"), _delete,
            writes=True, destructive=True,
        ),
        MemoryTool(
            "memory_list_namespaces",
            "List namespaces",
            "Namespaces with their counts.",
            Nothing, Namespaces, ("namespaces",), _namespaces,
        ),
        MemoryTool(
            "memory_health",
            "Check the service",
            "What works, what is degraded.",
            Nothing, Health, ("status", "mode", "degraded"), _health,
        ),
    )
}  # fmt: skip
