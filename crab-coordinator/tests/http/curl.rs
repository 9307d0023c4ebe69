//! curl, a client that many have tried against many servers, gets through the coordinator what it gets without it.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;

use tokio::io::AsyncWriteExt;

use crate::support::*;

/// `printf 'compressed' | gzip -n`
const GZIP: &[u8] =
    &[31, 139, 8, 0, 0, 0, 0, 0, 0, 3, 75, 206, 207, 45, 40, 74, 45, 46, 78, 77, 1, 0, 30, 75, 86, 151, 10, 0, 0, 0];

/// A server with an answer of every kind.
async fn model() -> Model {
    Model::start(|message, stream| {
        Box::pin(async move {
            let mut keep = true;
            let raw: Vec<u8> = match message.target().split('?').next().unwrap() {
                "/empty" => b"HTTP/1.1 204 No Content\r\nx-kind: empty\r\n\r\n".to_vec(),
                "/same" => b"HTTP/1.1 304 Not Modified\r\netag: \"a\"\r\n\r\n".to_vec(),
                "/elsewhere" => {
                    b"HTTP/1.1 307 Temporary Redirect\r\nlocation: /echo\r\ncontent-length: 0\r\n\r\n".to_vec()
                }
                "/missing" => b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\nnone".to_vec(),
                "/part" => {
                    b"HTTP/1.1 206 Partial Content\r\ncontent-range: bytes 0-3/10\r\ncontent-length: 4\r\n\r\npart"
                        .to_vec()
                }
                "/gzip" => {
                    let mut raw =
                        format!("HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {}\r\n\r\n", GZIP.len())
                            .into_bytes();
                    raw.extend_from_slice(GZIP);
                    raw
                }
                "/chunks" => {
                    let mut raw = b"HTTP/1.1 200 OK\r\ntrailer: x-sum\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
                    for n in 0..100 {
                        raw.extend(chunk(format!("piece {n}\n").as_bytes()));
                    }
                    raw.extend_from_slice(b"0\r\nx-sum: 7\r\n\r\n");
                    raw
                }
                "/until-closed" => {
                    keep = false;
                    b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nto the end".to_vec()
                }
                "/big" => {
                    let mut raw = b"HTTP/1.1 200 OK\r\ncontent-length: 3000000\r\n\r\n".to_vec();
                    raw.extend((0..3_000_000).map(|n| (n % 251) as u8));
                    raw
                }
                // Says what arrived.
                _ => {
                    let method = message.start.split(' ').next().unwrap();
                    let mut text = format!("{method} {}\n", message.target());
                    for name in ["content-type", "range", "if-none-match", "x-mine", "user-agent", "accept"] {
                        text += &format!("{name}: {:?}\n", message.header(name));
                    }
                    let mut body = text.into_bytes();
                    body.extend(&message.body);
                    let mut raw = format!("HTTP/1.1 200 OK\r\nx-kind: echo\r\ncontent-length: {}\r\n\r\n", body.len())
                        .into_bytes();
                    raw.extend(if method == "HEAD" { Vec::new() } else { body });
                    raw
                }
            };
            stream.lock().await.write_all(&raw).await.is_ok() && keep
        })
    })
    .await
}

/// curl's exit status, what it received, and what it says of the transfer.
async fn curl(
    address: SocketAddr,
    path: &str,
    arguments: &[&str],
    dir: &Path,
) -> Option<(Option<i32>, Vec<u8>, Vec<String>)> {
    let (head, body) = (dir.join("head"), dir.join("body"));
    let _ = std::fs::remove_file(&body);
    let running = tokio::process::Command::new("curl")
        .args([
            "--silent",
            "--show-error",
            "--max-time",
            "50",
            "--write-out",
            "%{http_code} %{num_redirects}",
            "--dump-header",
        ])
        .arg(&head)
        .arg("--output")
        .arg(&body)
        .args(arguments)
        .arg(format!("http://{address}{path}"))
        .current_dir(dir)
        .env_remove("http_proxy")
        .stdin(std::fs::File::open(dir.join("upload")).unwrap())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .output()
        .await;
    let output = running.ok()?;
    // With --head, the head is the output; a forwarder adds the date where there is none.
    let mut body = std::fs::read(&body).unwrap_or_default();
    if arguments.contains(&"--head") {
        body.clear();
    }
    let mut headers: Vec<String> = std::fs::read_to_string(&head)
        .unwrap()
        .lines()
        .filter(|line| ["x-", "etag", "location", "content-"].iter().any(|name| line.starts_with(name)))
        .map(str::to_owned)
        .collect();
    headers.sort();
    headers.push(String::from_utf8_lossy(&output.stdout).into_owned());
    Some((output.status.code(), body, headers))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn curl_gets_the_same_with_and_without_the_coordinator() {
    let model = model().await;
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("upload"), (0..2_000_000).map(|n| (n % 250) as u8).collect::<Vec<_>>()).unwrap();
    let (_coordinator, boundaries, address) = start_with(builder(model.address)).await;
    open_all(boundaries);
    let cases: &[(&str, &[&str])] = &[
        ("/echo", &[]),
        ("/echo?a=1&b=%2F%20", &["--header", "x-mine: 1"]),
        ("/echo", &["--head"]),
        ("/echo", &["--request", "DELETE"]),
        ("/echo", &["--request", "OPTIONS"]),
        ("/echo", &["--request", "PATCH", "--data", "a=b"]),
        ("/echo", &["--data", ""]),
        ("/echo", &["--data-binary", "@upload"]),
        ("/echo", &["--data-binary", "@upload", "--header", "Expect: 100-continue"]),
        ("/echo", &["--upload-file", "upload"]),
        ("/echo", &["--upload-file", "-"]),
        ("/echo", &["--header", "Connection: close"]),
        ("/empty", &[]),
        ("/same", &["--header", "if-none-match: \"a\""]),
        ("/elsewhere", &["--location", "--data", "again"]),
        ("/missing", &[]),
        ("/part", &["--range", "0-3"]),
        ("/gzip", &[]),
        ("/gzip", &["--compressed"]),
        ("/chunks", &[]),
        ("/chunks", &["--header", "TE: trailers"]),
        ("/until-closed", &[]),
        ("/big", &[]),
        ("/v1/messages", &["--data-binary", "{\"messages\":[1]}"]),
        ("/v1/messages", &["--data-binary", "@upload"]),
        ("/v1/chat/completions", &["--upload-file", "-", "--request", "POST"]),
        ("/v1/responses", &["--data", "x", "--header", "Expect: 100-continue"]),
    ];
    for (path, arguments) in cases {
        let Some(expected) = curl(model.address, path, arguments, dir.path()).await else {
            println!("skipped: curl");
            return;
        };
        for version in ["--http1.1", "--http1.0", "--http2", "--http2-prior-knowledge"] {
            // HTTP/1.0 knows no chunks.
            let chunks = arguments.contains(&"-") || arguments.contains(&"TE: trailers");
            // curl before 8.0 cannot use such a connection twice.
            let twice = arguments.contains(&"--location");
            if (version == "--http1.0" && chunks) || (version == "--http2-prior-knowledge" && twice) {
                continue;
            }
            let arguments = [&[version], *arguments].concat();
            let got = curl(address, path, &arguments, dir.path()).await.unwrap();
            let shown = |body: &[u8]| String::from_utf8_lossy(&body[..body.len().min(300)]).into_owned();
            assert_eq!(got.0, expected.0, "{path} {arguments:?}");
            assert!(got.1 == expected.1, "{path} {arguments:?}: {} where {}", shown(&got.1), shown(&expected.1));
            // How a body of unknown length is framed depends on the version.
            let headers = |all: &[String]| -> Vec<String> {
                all.iter().filter(|line| !line.starts_with("x-sum")).cloned().collect()
            };
            assert_eq!(headers(&got.2), headers(&expected.2), "{path} {arguments:?}");
        }
    }
}
