//! `cargo xtask bpf`: the committed BPF objects from their C source.

use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use crate::command;

/// The compiler whose output is committed. Another one makes other bytes.
const CLANG: &str = "14.0.6";
const ADVICE: &str = "on Debian 12: apt-get install clang-14 llvm-14 libbpf-dev";

/// Builds the objects. With `--check` it builds them elsewhere and compares, where the compiler is at hand.
pub(crate) fn main(arguments: &[String]) -> Result<ExitCode, String> {
    let check = match arguments {
        [] => false,
        [only] if only == "--check" => true,
        _ => return Err("cargo xtask bpf [--check]".to_owned()),
    };
    let Some((clang, strip)) = compiler() else {
        if check {
            println!("skipped: clang {CLANG} and libbpf's headers, to compare the BPF objects with their source");
            return Ok(ExitCode::SUCCESS);
        }
        return Err(format!("clang {CLANG}, llvm-strip or libbpf's headers are missing; {ADVICE}"));
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crab-inspector/bpf/build.sh");
    let mut build = Command::new(script);
    build.env("CLANG", clang).env("LLVM_STRIP", strip);
    if check {
        build.arg("--check");
    }
    let status = build.status().map_err(|error| format!("cannot run build.sh: {error}"))?;
    match (status.success(), check) {
        (true, true) => println!("xtask: the BPF objects are those of their source"),
        (true, false) => println!("xtask: the BPF objects are built"),
        (false, true) => return Err("the BPF objects are not those of their source: run `cargo xtask bpf`".to_owned()),
        (false, false) => return Err("the BPF objects could not be built".to_owned()),
    }
    Ok(ExitCode::SUCCESS)
}

/// The right clang and its llvm-strip.
fn compiler() -> Option<(&'static str, &'static str)> {
    if !Path::new("/usr/include/bpf/bpf_helpers.h").exists() {
        return None;
    }
    [("clang", "llvm-strip"), ("clang-14", "llvm-strip-14")].into_iter().find(|(clang, strip)| {
        let said = Command::new(clang).arg("--version").stderr(Stdio::null()).output();
        let right = said.is_ok_and(|said| String::from_utf8_lossy(&said.stdout).contains(CLANG));
        right && command::find(strip).is_some()
    })
}
