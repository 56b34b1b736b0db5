"""Commands from a template and inputs: `map` with its job log, and the arrays of `submit --each-line` and
`--param`."""
