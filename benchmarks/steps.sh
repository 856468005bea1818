# Sourced by the other scripts here, which are called with FOLDER [STEP ...]. Changes to the root of the repository,
# creates FOLDER and removes it from the arguments. The scripts set defaults for LIMIT and LINES_SHOWN.
set -u
[ $# -gt 0 ] || { echo "usage: $0 FOLDER [STEP ...]" >&2 && exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
folder=$(mkdir -p "$1" && cd "$1" && pwd) || exit 1
shift
python=${PYTHON:-python3}
failures=0

# step NAME COMMAND ...: run a command with its output in FOLDER/NAME.txt and NAME.err, show the last lines and count
# failures. After LIMIT seconds it gets SIGINT, so that it can save its partial results.
step() {
  local name=$1 began=$SECONDS
  shift
  if timeout -s INT -k 20 "$LIMIT" "$@" >"$folder/$name.txt" 2>"$folder/$name.err"; then
    echo "ok    $name ($((SECONDS - began)) s)"
    tail -n "$LINES_SHOWN" "$folder/$name.txt"
  else
    failures=$((failures + 1))
    echo "FAIL  $name ($((SECONDS - began)) s), last lines of $folder/$name.txt and $name.err:"
    tail -q -n 20 "$folder/$name.txt" "$folder/$name.err"
  fi
}
