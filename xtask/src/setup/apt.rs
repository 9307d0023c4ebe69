//! The host's Debian mirror, and a private apt that leaves the host's alone.

use std::path::Path;

use super::write;
use crate::command;

/// The keys that Debian signs its archive with.
pub(crate) const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// The URI of the Debian main archive that this system is set up to use.
pub(crate) fn mirror() -> Result<String, String> {
    let mut files = vec![std::path::PathBuf::from("/etc/apt/sources.list")];
    if let Ok(directory) = std::fs::read_dir("/etc/apt/sources.list.d") {
        let mut parts: Vec<_> = directory.flatten().map(|entry| entry.path()).collect();
        parts.sort();
        files.extend(parts);
    }
    for file in files {
        let Ok(text) = std::fs::read_to_string(&file) else {
            continue;
        };
        let found = match file.extension().and_then(|extension| extension.to_str()) {
            Some("sources") => mirror_in_deb822(&text),
            Some("list") => mirror_in_list(&text),
            _ => None,
        };
        if let Some(uri) = found {
            return Ok(uri);
        }
    }
    Err("no Debian archive in this system's apt sources: CRIU and the sandboxes' root come from \
         one. Add a `deb` line for Debian's main archive to /etc/apt/sources.list"
        .to_owned())
}

/// Debian's own suites; a line with another suite belongs to some other archive.
fn is_debian_suite(suite: &str) -> bool {
    const NAMES: &[&str] =
        &["bullseye", "bookworm", "trixie", "forky", "sid", "stable", "oldstable", "testing", "unstable"];
    NAMES.contains(&suite)
}

/// Whether a URI looks like Debian's main archive (security and third parties live elsewhere).
fn is_main_archive(uri: &str, suites: &[&str], components: &[&str]) -> bool {
    let path = uri.trim_end_matches('/');
    path.ends_with("/debian") && suites.iter().copied().any(is_debian_suite) && components.contains(&"main")
}

fn mirror_in_deb822(text: &str) -> Option<String> {
    let text: String = text.lines().filter(|line| !line.starts_with('#')).map(|line| format!("{line}\n")).collect();
    for stanza in text.split("\n\n") {
        let field = |name: &str| -> Vec<&str> {
            let mut words = Vec::new();
            let mut inside = false;
            for line in stanza.lines() {
                if line.starts_with([' ', '\t']) {
                    if inside {
                        words.extend(line.split_whitespace());
                    }
                } else if let Some((key, value)) = line.split_once(':') {
                    inside = key.eq_ignore_ascii_case(name);
                    if inside {
                        words.extend(value.split_whitespace());
                    }
                }
            }
            words
        };
        if !field("Types").contains(&"deb") || field("Enabled") == ["no"] {
            continue;
        }
        let (suites, components) = (field("Suites"), field("Components"));
        for uri in field("URIs") {
            if is_main_archive(uri, &suites, &components) {
                return Some(uri.trim_end_matches('/').to_owned());
            }
        }
    }
    None
}

fn mirror_in_list(text: &str) -> Option<String> {
    for line in text.lines() {
        let Some(line) = line.trim().strip_prefix("deb ") else {
            continue;
        };
        let line = line.split('#').next().unwrap_or_default().trim_start();
        let line = match line.strip_prefix('[') {
            Some(rest) => rest.split_once(']').map_or("", |(_, rest)| rest),
            None => line,
        };
        let words: Vec<&str> = line.split_whitespace().collect();
        if let [uri, suite, components @ ..] = words.as_slice()
            && is_main_archive(uri, &[suite], components)
        {
            return Some(uri.trim_end_matches('/').to_owned());
        }
    }
    None
}

/// The host's own ways to reach its mirror (proxies, certificates), to be kept by a private apt.
pub(crate) fn transport_options() -> Vec<String> {
    let dump = command::output(command::system("apt-config").arg("dump")).unwrap_or_default();
    dump.lines()
        .filter(|line| {
            let lower = line.to_ascii_lowercase();
            (lower.starts_with("acquire::http::") || lower.starts_with("acquire::https::")) && !lower.ends_with("\"\";")
        })
        .map(str::to_owned)
        .collect()
}

/// An apt with its own lists, its own idea of what is installed (nothing) and one source.
pub(super) struct PrivateApt {
    config: std::path::PathBuf,
    archives: std::path::PathBuf,
}

impl PrivateApt {
    /// Lays it out in `directory`, which the caller removes when done.
    pub(super) fn new(directory: &Path, mirror: &str, suite: &str) -> Result<Self, String> {
        for part in ["state/lists/partial", "cache/archives/partial", "etc"] {
            let path = directory.join(part);
            std::fs::create_dir_all(&path).map_err(|error| format!("cannot make {}: {error}", path.display()))?;
        }
        write(&directory.join("status"), "")?;
        write(&directory.join("etc/sources.list"), &format!("deb [signed-by={KEYRING}] {mirror} {suite} main\n"))?;
        let root = directory.display();
        let mut text = format!(
            "Dir::State \"{root}/state\";\n\
             Dir::State::status \"{root}/status\";\n\
             Dir::Cache \"{root}/cache\";\n\
             Dir::Etc::SourceList \"{root}/etc/sources.list\";\n\
             Dir::Etc::SourceParts \"{root}/etc/none\";\n\
             Dir::Etc::Preferences \"{root}/etc/none\";\n\
             Dir::Etc::PreferencesParts \"{root}/etc/none\";\n\
             Dir::Log \"{root}\";\n\
             APT::Install-Recommends \"false\";\n\
             APT::Sandbox::User \"root\";\n\
             Acquire::Check-Valid-Until \"false\";\n\
             Acquire::Languages \"none\";\n\
             Acquire::Retries \"3\";\n"
        );
        for line in transport_options() {
            text.push_str(&line);
            text.push('\n');
        }
        let config = directory.join("apt.conf");
        write(&config, &text)?;
        Ok(Self { config, archives: directory.join("cache/archives") })
    }

    /// Downloads a package with all that it depends on; returns the files.
    pub(super) fn download(&self, package: &str) -> Result<Vec<std::path::PathBuf>, String> {
        command::run(self.apt_get().args(["update", "-q"]))?;
        command::run(self.apt_get().args(["install", "-q", "-y", "--download-only", package]))?;
        let entries = std::fs::read_dir(&self.archives)
            .map_err(|error| format!("cannot read {}: {error}", self.archives.display()))?;
        let mut files: Vec<_> = entries
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "deb"))
            .collect();
        files.sort();
        Ok(files)
    }

    fn apt_get(&self) -> std::process::Command {
        let mut command = command::system("apt-get");
        command.env("APT_CONFIG", &self.config);
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_main_archive_is_found_in_deb822_sources() {
        let text = "Types: deb\nURIs: http://one.example/debian-security\nSuites: bookworm-security\n\
                    Components: main\n\nTypes: deb\n# a remark\nURIs: http://two.example/debian/\n\
                    Suites: bookworm bookworm-updates\nComponents: main contrib\n";
        assert_eq!(mirror_in_deb822(text).as_deref(), Some("http://two.example/debian"));
    }

    #[test]
    fn a_disabled_or_foreign_stanza_is_no_mirror() {
        let off = "Types: deb\nEnabled: no\nURIs: http://one.example/debian\nSuites: bookworm\nComponents: main\n";
        assert_eq!(mirror_in_deb822(off), None);
        let foreign = "Types: deb\nURIs: http://one.example/debian\nSuites: nodistro\nComponents: main\n";
        assert_eq!(mirror_in_deb822(foreign), None);
    }

    #[test]
    fn the_main_archive_is_found_in_one_line_sources() {
        let text = "# deb http://no.example/debian bookworm main\n\
                    deb http://packages.example/tool stable main\n\
                    deb [arch=amd64 signed-by=/k.gpg] http://two.example/debian bookworm main # yes\n";
        assert_eq!(mirror_in_list(text).as_deref(), Some("http://two.example/debian"));
    }
}
