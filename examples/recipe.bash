# Shared by the scripts of this directory: reads their arguments, then trains or plans. Not run by itself.
#
# A script sets `published` (a file of launcher/src/commands/synth/configs, without .json) and `hardware` (what `launcher plan`
# plans for), then calls `recipe FLAG... -- "$@"` with the training flags in front of the user's words.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  local name=${0##*/}
  # The script's own header says what it trains.
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
  cat <<TEXT

usage: examples/$name MODEL DATA OUTPUT [FLAG...]   train
       examples/$name plan [FLAG...]                print the memory plan for ${hardware[*]}

  MODEL   directory of the checkpoint: config.json, tokenizer files, safetensors files
  DATA    training samples, in one of the forms of --data-format
  OUTPUT  directory of the run: logs, reports, checkpoints
  FLAG    any training flag as --flag VALUE or --flag=VALUE; it replaces the script's flag of the same name

MODEL, DATA and OUTPUT may be environment variables instead. PLAN=1 means plan. LAUNCHER is the command that starts
the program; the default is "cargo run --release -p launcher --", which works inside the repository.
TEXT
}

# Whether one of WORD... is the flag FLAG, written as --flag VALUE or --flag=VALUE.
has() { # FLAG WORD...
  local word
  for word in "${@:2}"; do [ "${word%%=*}" != "$1" ] || return 0; done
  return 1
}

recipe() { # FLAG VALUE FLAG VALUE ... -- WORD...
  local own=() flags=() plan=${PLAN:-0} name i
  while [ "$1" != -- ]; do own+=("$1"); shift; done
  shift
  case ${1:-} in
    -h | --help) usage; exit ;;
    plan) plan=1; shift ;;
  esac
  # The words in front of the first flag; the environment has the rest.
  for name in MODEL DATA OUTPUT; do
    case ${1:-} in
      '' | -*) break ;;
      *) printf -v "$name" %s "$1"; shift ;;
    esac
  done
  if [ "$plan" = 1 ]; then
    own=(--model "$root/launcher/src/commands/synth/configs/$published.json" "${hardware[@]}" "${own[@]}")
    flags=(plan --no-weights)
  else
    for name in MODEL DATA OUTPUT; do
      [ -n "${!name:-}" ] || { printf '%s is missing\n\n' "$name" >&2; usage >&2; exit 2; }
    done
    own=(--model "$MODEL" --data "$DATA" --output "$OUTPUT" "${own[@]}")
  fi
  for ((i = 0; i < ${#own[@]}; i += 2)); do
    has "${own[i]}" "$@" || flags+=("${own[@]:i:2}")
  done
  # shellcheck disable=SC2086  # LAUNCHER may be several words.
  exec ${LAUNCHER:-cargo run --release -p launcher --} "${flags[@]}" "$@"
}
