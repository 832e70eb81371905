"""Compares simulated records with the committed ones and names every figure that moved.

usage: compare_records.py REFERENCE.jsonl NEW.jsonl   (the new ones may be some of the reference's)
"""
import json
import sys

POINT = ("system", "model", "cluster", "nodes", "seq_len", "global_batch")


def flat(record, path=""):
    for key, value in record.items():
        if isinstance(value, dict):
            yield from flat(value, path + key + ".")
        else:
            yield path + key, value


def read(file):
    with open(file) as lines:
        records = [(line.rstrip("\n"), json.loads(line)) for line in lines]
    return {tuple(record[key] for key in POINT): (line, record) for line, record in records}


def main(reference_file, new_file):
    reference, new = read(reference_file), read(new_file)
    moved = 0
    for point, (line, record) in new.items():
        name = " ".join(str(part) for part in point)
        if point not in reference:
            print(f"{name}: not in {reference_file}")
            moved += 1
            continue
        old_line, old = reference[point]
        if line == old_line:
            continue
        before, after = dict(flat(old)), dict(flat(record))
        for key in sorted(before.keys() | after.keys()):
            if before.get(key) != after.get(key):
                print(f"{name}: {key} was {before.get(key)}, is {after.get(key)}")
                moved += 1
        if before == after:
            print(f"{name}: same figures, other bytes")
            moved += 1
    if not new:
        print(f"{new_file}: no records")
        moved += 1
    return 1 if moved else 0


sys.exit(main(*sys.argv[1:]))
