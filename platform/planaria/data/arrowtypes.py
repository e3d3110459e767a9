"""What an Arrow column can hold for a sample, told from its type."""

from __future__ import annotations

import pyarrow as pa

from planaria.data.columns import Kind


def kinds_of(schema: pa.Schema) -> dict[str, Kind]:
    """The kind of every column."""
    return {field.name: _kind(field.type) for field in schema}


def _kind(type: pa.DataType) -> Kind:
    if _is_blob(type):
        return "bytes"
    if _is_text(type) or (pa.types.is_dictionary(type) and _is_text(type.value_type)):
        return "text"
    if pa.types.is_struct(type):
        return "picture" if _is_picture(type) else "other"
    if pa.types.is_list(type) or pa.types.is_large_list(type) or pa.types.is_fixed_size_list(type):
        inner = type.value_type
        if _is_blob(inner) or _is_text(inner) or (pa.types.is_struct(inner) and _is_picture(inner)):
            return "pictures"
        return "messages" if pa.types.is_struct(inner) else "other"
    return "other"


def _is_blob(type: pa.DataType) -> bool:
    return pa.types.is_binary(type) or pa.types.is_large_binary(type) or pa.types.is_binary_view(type)


def _is_text(type: pa.DataType) -> bool:
    return pa.types.is_string(type) or pa.types.is_large_string(type) or pa.types.is_string_view(type)


def _is_picture(type: pa.StructType) -> bool:
    names = {type.field(at).name: type.field(at).type for at in range(type.num_fields)}
    return "bytes" in names and _is_blob(names["bytes"])
