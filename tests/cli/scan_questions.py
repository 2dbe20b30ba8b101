TABLE = """
CREATE VIEW models AS
SELECT * FROM read_json('models.jsonl', format='newline_delimited', columns={
    path: 'VARCHAR', nbytes: 'BIGINT', mtime_ns: 'BIGINT', scanned_ns: 'BIGINT', format: 'VARCHAR', form: 'VARCHAR',
    writer: 'STRUCT(name VARCHAR, version VARCHAR)', tensors: 'BIGINT', parameters: 'BIGINT', numel: 'BIGINT',
    tensors_nbytes: 'BIGINT', weights_nbytes: 'BIGINT', rest_nbytes: 'BIGINT',
    dtypes: 'MAP(VARCHAR, BIGINT)', devices: 'MAP(VARCHAR, BIGINT)', prefixes: 'VARCHAR[]',
    roles: 'MAP(VARCHAR, STRUCT(tensors BIGINT, numel BIGINT, nbytes BIGINT))',
    findings: 'MAP(VARCHAR, BIGINT)', worst: 'VARCHAR', grade: 'VARCHAR', digest: 'VARCHAR',
    error: 'STRUCT(kind VARCHAR, "type" VARCHAR, message VARCHAR)'
})
QUALIFY row_number() OVER (PARTITION BY path ORDER BY scanned_ns DESC) = 1
"""
QUESTIONS = {
    "How much is there of each format?": """
        SELECT format, count(*) AS checkpoints, sum(nbytes) AS nbytes
        FROM models WHERE error IS NULL GROUP BY format ORDER BY nbytes DESC
    """,
    "Which hold float32, and how much would half of it save?": """
        SELECT path, weights_nbytes // 2 AS saved
        FROM models WHERE list_contains(map_keys(dtypes), 'float32') ORDER BY saved DESC
    """,
    "Which still carry an optimizer, and how large is it?": """
        SELECT path, roles['optimizer'].nbytes AS nbytes
        FROM models WHERE list_contains(map_keys(roles), 'optimizer') ORDER BY nbytes DESC
    """,
    "Which are copies of each other, and what do the copies take?": """
        SELECT digest, list(path ORDER BY mtime_ns) AS paths, sum(nbytes) - max(nbytes) AS nbytes
        FROM models WHERE digest IS NOT NULL GROUP BY digest HAVING count(*) > 1 ORDER BY nbytes DESC
    """,
    "Which run code when they are loaded?": """
        SELECT path, grade FROM models WHERE grade IN ('code', 'system') ORDER BY grade DESC, path
    """,
    "Which could not be opened, and why?": """
        SELECT error.kind, count(*) AS files, any_value(path) AS one_of_them, any_value(error.message) AS message
        FROM models WHERE error IS NOT NULL GROUP BY error.kind ORDER BY files DESC
    """,
    "Which name devices that a CPU server does not have?": """
        SELECT path, map_keys(devices) AS devices
        FROM models WHERE len(list_filter(map_keys(devices), lambda one: one NOT IN ('cpu', 'meta'))) > 0 ORDER BY path
    """,
    "Which need their names changed, because a wrapper is in them?": """
        SELECT path, array_to_string(prefixes, '') AS prefix
        FROM models WHERE list_has_any(prefixes, ['module.', '_orig_mod.', '_fsdp_wrapped_module.']) ORDER BY path
    """,
    "What is found most often, and in which framework's files?": """
        SELECT code, writer.name AS framework, count(*) AS files
        FROM (SELECT unnest(map_keys(findings)) AS code, writer FROM models) GROUP BY ALL ORDER BY files DESC
    """,
    "What has not been written for a year, and is more than half no weights?": """
        SELECT path, rest_nbytes, make_timestamp_ns(mtime_ns) AS written
        FROM models WHERE rest_nbytes > nbytes / 2 AND make_timestamp_ns(mtime_ns) < now()::TIMESTAMP - INTERVAL 1 YEAR
        ORDER BY rest_nbytes DESC
    """,
}
