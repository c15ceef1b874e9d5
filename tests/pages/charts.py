"""What a chart says: its data and encodings, as they are in Vega-Lite's JSON."""


def _nodes(node):
    """All objects of a definition, from the outside inwards."""
    if isinstance(node, dict):
        yield node
        for value in node.values():
            yield from _nodes(value)
    elif isinstance(node, list):
        for value in node:
            yield from _nodes(value)


def spec_of(chart):
    if isinstance(chart, dict):
        return chart
    return chart.to_dict()


def rows_of(chart, **fields):
    """The rows of all its data in which the fields have these values."""
    spec = spec_of(chart)
    named = spec.get("datasets", {})
    rows = []
    for node in _nodes({key: value for key, value in spec.items() if key != "datasets"}):
        data = node.get("data")
        if not isinstance(data, dict):
            continue
        if "values" in data:
            rows += data["values"]
        else:
            rows += named[data["name"]]
    for key, value in fields.items():
        rows = [row for row in rows if row.get(key) == value]
    return rows


def parts(chart):
    """The charts that stand below each other, each with the data of the whole."""
    spec = spec_of(chart)
    return [part | {"datasets": spec.get("datasets", {})} for part in spec["vconcat"]]


def panels(chart):
    """The names of the panels, in their order; each is the title of its own."""
    spec = spec_of(chart)
    names = []
    for panel in spec.get("concat", [spec]):
        rows = rows_of({**panel, "datasets": spec.get("datasets", {})})
        (name,) = {row["panel"] for row in rows}
        assert " ".join(panel["title"]).split() == name.split()
        names.append(name)
    return names


def encodings(chart, channel):
    """All encodings of a channel, in the order of the layers."""
    found = [node["encoding"] for node in _nodes(spec_of(chart)) if "encoding" in node]
    return [encoding[channel] for encoding in found if encoding.get(channel) is not None]


def marks(chart):
    """The kinds of marks, in the order of the layers."""
    return [node["mark"]["type"] for node in _nodes(spec_of(chart)) if "encoding" in node]


def legend(chart):
    """The names in the legend of colours, in its order."""
    return next(
        encoding["legend"]["values"]
        for encoding in encodings(chart, "color")
        if encoding.get("legend")
    )
