# shellcheck shell=bash
# Brings perf_analyzer to this checkout; sourced after setup.sh by scripts/perf_analyzer.sh.
#
#   setup_perf_analyzer    leaves the words that start it in the array PERF_ANALYZER
#
# The one on PATH (Triton's SDK container), else the package perf-analyzer in .cache. That one needs glibc 2.38; where the
# system's is older it gets libraries of the distribution's next release beside it, which nothing else uses.

PERF_ANALYZER_VERSION=2.60.0
NEXT_RELEASE_PACKAGES=(libc6 libstdc++6 libgcc-s1 zlib1g libssl3t64 libzstd1)

setup_perf_analyzer() {
  local home="$ROOT/.cache/perf_analyzer-$PERF_ANALYZER_VERSION"
  if command -v perf_analyzer >/dev/null; then
    PERF_ANALYZER=(perf_analyzer)
    return
  fi
  [[ -d "$home" ]] || locked install_perf_analyzer "$home"
  PERF_ANALYZER=("$home/perf_analyzer/bin/perf_analyzer")
  if [[ -d "$home/libraries" ]]; then
    local lib="$home/libraries/usr/lib/x86_64-linux-gnu"
    PERF_ANALYZER=("$lib/ld-linux-x86-64.so.2" --library-path "$lib" "${PERF_ANALYZER[@]}")
  fi
}

install_perf_analyzer() {
  local home="$1" draft="$1.draft"
  [[ ! -d "$home" ]] || return 0
  say "fetching perf_analyzer $PERF_ANALYZER_VERSION into .cache"
  rm -rf "$draft" && mkdir -p "$draft"
  # By platform: pip offers an older system only an empty package of the same name.
  "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --platform manylinux_2_38_x86_64 --dest "$draft" \
    "perf-analyzer==$PERF_ANALYZER_VERSION" >&2 || fail "pip could not fetch perf-analyzer; its message is above"
  "$PYTHON" -m zipfile -e "$draft"/perf_analyzer-*.whl "$draft"
  rm "$draft"/perf_analyzer-*.whl
  chmod +x "$draft/perf_analyzer/bin/perf_analyzer"
  "$draft/perf_analyzer/bin/perf_analyzer" --version >/dev/null 2>&1 || fetch_next_release "$draft"
  mv "$draft" "$home"
}

# Unpacks NEXT_RELEASE_PACKAGES into $1/libraries, from where the system's own packages come.
fetch_next_release() {
  local draft="$1" apt="$1/apt" next keyring source package
  . /etc/os-release
  case "${ID:-}" in
    debian) next=trixie keyring=/usr/share/keyrings/debian-archive-keyring.gpg ;;
    ubuntu) next=noble keyring=/usr/share/keyrings/ubuntu-archive-keyring.gpg ;;
    *) fail "perf_analyzer needs glibc 2.38 or newer; use the one in Triton's SDK container" ;;
  esac
  # shellcheck disable=SC2016 # apt's own variables
  source="$(apt-get indextargets --format '$(RELEASE) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' |
    awk -v release="${VERSION_CODENAME:-}" '$1 == release && $2 == "main" { print $3; exit }')"
  [[ -n "$source" ]] || fail "perf_analyzer needs glibc 2.38 or newer, and no package source of this ${ID} is known to apt"
  mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$draft/libraries"
  echo "deb [signed-by=$keyring] $source $next main" >"$apt/sources.list"
  local options=(-qq -o "Dir::State::Lists=$apt/lists" -o "Dir::Cache=$apt/cache"
    -o "Dir::Etc::SourceList=$apt/sources.list" -o Dir::Etc::SourceParts=/dev/null -o APT::Sandbox::User=root)
  (cd "$apt" && apt-get "${options[@]}" update && apt-get "${options[@]}" download "${NEXT_RELEASE_PACKAGES[@]}") >&2 ||
    fail "apt could not fetch the libraries of $next; its message is above"
  for package in "$apt"/*.deb; do dpkg-deb -x "$package" "$draft/libraries"; done
  rm -rf "$apt"
}
