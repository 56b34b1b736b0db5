"""Commands made from a template and inputs: `map` with its job log and its display, and the arrays of `submit --each-line` and
`--param`."""
