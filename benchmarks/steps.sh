# Sourced by the scripts beside it, which are called with FOLDER [STEP ...]: goes to the repository's root, makes the
# folder, and takes it off the arguments. They set LIMIT and LINES_SHOWN where the caller has not.
set -u
[ $# -gt 0 ] || { echo "usage: $0 FOLDER [STEP ...]" >&2 && exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
folder=$(mkdir -p "$1" && cd "$1" && pwd) || exit 1
shift
python=${PYTHON:-python3}
failures=0

# step NAME COMMAND ...: what it prints goes into FOLDER/NAME.txt and NAME.err; the end is shown, and failures are counted.
# One that is out of time hears Ctrl-C, and keeps what it has done.
step() {
  local name=$1 began=$SECONDS
  shift
  if timeout -s INT -k 20 "$LIMIT" "$@" >"$folder/$name.txt" 2>"$folder/$name.err"; then
    echo "ok    $name ($((SECONDS - began)) s)"
    tail -n "$LINES_SHOWN" "$folder/$name.txt"
  else
    failures=$((failures + 1))
    echo "FAIL  $name ($((SECONDS - began)) s), the end of $folder/$name.txt and $name.err:"
    tail -q -n 20 "$folder/$name.txt" "$folder/$name.err"
  fi
}
