# Sourced by the run scripts: `row SECONDS SCRIPT ARGUMENT...` runs one row and keeps its line of JSON.
# $name is that of the result file. $ONLY, a regular expression, names the rows to run, which are added to those of
# earlier calls: a machine lent for minutes makes a file in several.
# `site=FOLDER row ...` runs it with the packages of a folder (pip install --target) before the others.
python=${PYTHON:-python3}
out=${OUT:-$here/results}
mkdir -p "$out"
lines=$out/$name.jsonl
[ -n "${ONLY:-}" ] || : >"$lines"
export PYTHONPATH=$here/../../src:${PYTHONPATH:-} TOKENIZERS_PARALLELISM=false
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF-expandable_segments:True}

row() {
  local limit=$1 script=$2 start=("$python")
  shift 2
  [[ "$script $*" =~ ${ONLY:-.} ]] || return 0
  [ "${gpus:-1}" = 1 ] || start=("$python" -m torch.distributed.run --nproc-per-node "$gpus")
  echo "--- $script $*" >&2
  # the row is the last line of stdout; what went wrong ends up in the log
  PYTHONPATH=${site:+$site:}$PYTHONPATH timeout -k 10 "$limit" "${start[@]}" "$here/$script" "$@" >"$out/stdout.txt" 2>"$out/stderr.txt"
  local code=$?
  if [ $code = 0 ]; then
    tail -n 1 "$out/stdout.txt" | tee -a "$lines"
  else
    echo "exit code $code" >&2
    tail -n 30 "$out/stderr.txt" >&2
  fi
}

finish() {
  rm -f "$out/stdout.txt" "$out/stderr.txt"
  "$python" "$here/collect.py" "$lines" >"$out/$name.json"
  [ -n "${ONLY:-}" ] || rm "$lines"
}
