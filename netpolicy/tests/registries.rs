//! Registries through the node: what a date and a denial hide, and that there is no way around them.

#![allow(clippy::unwrap_used)]

mod world;

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::RecordType;
use netpolicy::{GATEWAY, Network, NetworkConfig, Reason};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use world::{SERVER, Sandbox, World, on_a_host};

/// A web server of the internet: what it has by path, and what it was asked for.
#[derive(Clone, Default)]
struct Site {
    pages: Arc<Mutex<BTreeMap<String, Vec<u8>>>>,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Site {
    fn put(&self, path: &str, content: impl Into<Vec<u8>>) {
        self.pages.lock().unwrap().insert(path.to_owned(), content.into());
    }

    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut *self.asked.lock().unwrap())
    }

    fn serve(&self, world: &World, port: u16) {
        let listener = world.internet.run(|| TcpListener::bind((SERVER, port)).unwrap());
        let site = self.clone();
        std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                let site = site.clone();
                std::thread::spawn(move || site.talk(stream));
            }
        });
    }

    fn talk(&self, mut stream: TcpStream) {
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
        while let Some(Ok(first)) = lines.next() {
            let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
            for line in lines.by_ref() {
                if line.is_ok_and(|line| line.is_empty()) {
                    break;
                }
            }
            self.asked.lock().unwrap().push(path.clone());
            let page = self.pages.lock().unwrap().get(&path).cloned();
            let (status, body) = match page {
                Some(body) => ("200 OK", body),
                None => ("404 Not Found", b"nothing".to_vec()),
            };
            let head = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n", body.len());
            if stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body)).is_err() {
                return;
            }
        }
    }
}

/// A world whose registries are one web server.
fn registries(world: &World) -> (Site, Network) {
    let site = Site::default();
    site.serve(world, 8080);
    let mirrors = [
        ("https://pypi.org", ""),
        ("https://files.pythonhosted.org", "/files"),
        ("https://registry.npmjs.org", "/npm"),
        ("https://proxy.golang.org", "/go"),
        ("http://deb.debian.org", "/deb"),
        ("http://snapshot.debian.org/archive", "/snapshot"),
    ];
    let mirrors = mirrors
        .iter()
        .map(|(url, place)| ((*url).to_owned(), format!("http://{SERVER}:8080{place}")))
        .collect();
    let config = NetworkConfig { mirrors, ..NetworkConfig::default() };
    (site, world.network_with(config))
}

/// The status and the body that a client in the sandbox gets.
fn get(sandbox: &Sandbox, host: &str, path: &str) -> (u16, String) {
    let mut stream = sandbox.connect(GATEWAY, 80).unwrap();
    let request =
        format!("GET {path} HTTP/1.1\r\nhost: {host}\r\naccept: */*\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    let text = String::from_utf8_lossy(&bytes);
    let status = text.split(' ').nth(1).unwrap().parse().unwrap();
    (status, text.split_once("\r\n\r\n").unwrap().1.to_owned())
}

/// A wheel that pip takes: a module with the version in it.
fn wheel(version: &str) -> Vec<u8> {
    let info = format!("answer-{version}.dist-info");
    let script = format!(
        "import io, sys, zipfile
z = io.BytesIO()
f = zipfile.ZipFile(z, 'w')
f.writestr('answer.py', 'version = {version:?}')
f.writestr('{info}/METADATA', 'Metadata-Version: 2.1\\nName: answer\\nVersion: {version}\\n')
f.writestr('{info}/WHEEL', 'Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')
f.writestr('{info}/RECORD', '')
f.close()
sys.stdout.buffer.write(z.getvalue())"
    );
    Command::new("python3").args(["-c", &script]).output().unwrap().stdout
}

const OLD: &str = "packages/aa/answer-1.0-py3-none-any.whl";
const NEW: &str = "packages/bb/answer-2.0-py3-none-any.whl";

fn python_packages(site: &Site) {
    let mut files = Vec::new();
    for (path, version, at) in
        [(OLD, "1.0", "2024-06-01T00:00:00.000000Z"), (NEW, "2.0", "2025-06-01T00:00:00.000000Z")]
    {
        let wheel = wheel(version);
        let hash: String =
            Sha256::digest(&wheel).iter().map(|byte| format!("{byte:02x}")).collect();
        files.push(format!(
            r#"{{"filename": "{}", "url": "https://files.pythonhosted.org/{path}",
                "hashes": {{"sha256": "{hash}"}}, "upload-time": "{at}", "size": {}}}"#,
            path.rsplit('/').next().unwrap(),
            wheel.len()
        ));
        site.put(&format!("/files/{path}"), wheel);
    }
    let index = format!(
        r#"{{"meta": {{"api-version": "1.1"}}, "name": "answer", "versions": ["1.0", "2.0"],
            "files": [{}]}}"#,
        files.join(",")
    );
    site.put("/simple/answer/", index);
}

#[test]
fn a_date_hides_newer_python_packages_from_every_side() {
    on_a_host(|world| {
        let (site, network) = registries(&world);
        python_packages(&site);
        for name in ["pypi.org", "files.pythonhosted.org"] {
            world.name(name, SERVER, 60);
        }
        let rules = ["pypi,before=2025-01-01,deny=Evil_Package", "*.org:443"];
        let sandbox = Sandbox::new(&network, &rules);
        let (status, index) = get(&sandbox, "x", "/pypi/simple/Answer/");
        assert_eq!(status, 200);
        assert!(index.contains("answer-1.0") && !index.contains("2.0"), "{index}");
        assert_eq!(get(&sandbox, "x", &format!("/pypi/files/answer/{OLD}")).0, 200);
        site.asked();
        // The newer one by its own address, also under another package's name.
        for path in [
            format!("/pypi/files/answer/{NEW}"),
            format!("/pypi/files/other/{NEW}"),
            format!("/pypi/files/answer/../answer/{NEW}"),
            format!("/pypi/files/answer/{OLD}/../../../{NEW}"),
        ] {
            assert_eq!(get(&sandbox, "x", &path).0, 404, "{path}");
        }
        assert!(!site.asked().iter().any(|path| path.contains("2.0")), "nobody was asked for it");
        assert!(sandbox.denied(|d| d.reason == Reason::Hidden).name.contains("answer-2.0"));
        assert_eq!(get(&sandbox, "x", "/pypi/simple/evil.package/").0, 404);
        assert_eq!(sandbox.denied(|d| d.name == "evil-package").reason, Reason::Hidden);
        assert!(!site.asked().iter().any(|path| path.contains("evil")));
        // Not around the node: neither by name, though another rule would allow it, nor by address.
        for name in ["pypi.org.", "files.pythonhosted.org."] {
            assert_eq!(sandbox.ask(name, RecordType::A).0, ResponseCode::NXDomain);
        }
        assert!(sandbox.connect(SERVER, 8080).is_err());
        assert!(sandbox.connect(SERVER, 443).is_err());
        // Other registries are not part of this policy, and a sandbox without one has none.
        assert_eq!(get(&sandbox, "x", "/npm/answer").0, 403);
        let closed = Sandbox::new(&network, &["192.0.2.9"]);
        assert_eq!(get(&closed, "x", "/pypi/simple/answer/").0, 403);
        sandbox.member.set_policy(netpolicy::Policy::parse(&["pypi"]).unwrap()).unwrap();
        assert_eq!(get(&sandbox, "x", &format!("/pypi/files/answer/{NEW}")).0, 200);
    });
}

#[test]
fn pip_sees_what_it_may_see() {
    on_a_host(|world| {
        let (site, network) = registries(&world);
        python_packages(&site);
        let folder = tempfile::tempdir().unwrap();
        let pip = |sandbox: &Sandbox, words: &[&str]| {
            let mut command = Command::new("python3");
            command.args(["-m", "pip", "--isolated", "--disable-pip-version-check"]).args(words);
            command
                .env_clear()
                .env("PATH", std::env::var("PATH").unwrap())
                .env("HOME", folder.path());
            let index = format!("http://{GATEWAY}/pypi/simple/");
            let node = GATEWAY.to_string();
            command.args(["--no-cache-dir", "--index-url", &index, "--trusted-host", &node]);
            command.current_dir(folder.path());
            sandbox.place.run(|| command.output().unwrap())
        };
        let download = ["download", "--no-deps", "answer"];
        let sandbox = Sandbox::new(&network, &["pypi,before=2025-01-01"]);
        let done = pip(&sandbox, &download);
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        assert!(folder.path().join("answer-1.0-py3-none-any.whl").exists());
        assert!(!pip(&sandbox, &["download", "--no-deps", "answer==2.0"]).status.success());
        let open = Sandbox::new(&network, &["pypi"]);
        assert!(pip(&open, &download).status.success());
        assert!(folder.path().join("answer-2.0-py3-none-any.whl").exists());
        let denied = Sandbox::new(&network, &["pypi,deny=answer"]);
        assert!(!pip(&denied, &download).status.success());
    });
}

#[test]
fn a_date_hides_newer_versions_of_npm_go_and_debian() {
    on_a_host(|world| {
        let (site, network) = registries(&world);
        let version = |number: &str| {
            format!(
                r#""{number}": {{"version": "{number}", "dist":
                {{"tarball": "https://registry.npmjs.org/answer/-/answer-{number}.tgz"}}}}"#
            )
        };
        site.put("/npm/answer", format!(
            r#"{{"name": "answer", "dist-tags": {{"latest": "2.0.0"}}, "versions": {{{}, {}}},
                "time": {{"1.0.0": "2024-06-01T00:00:00.000Z", "2.0.0": "2025-06-01T00:00:00.000Z"}}}}"#,
            version("1.0.0"),
            version("2.0.0")
        ));
        site.put("/npm/answer/-/answer-1.0.0.tgz", "old");
        site.put("/npm/answer/-/answer-2.0.0.tgz", "new");
        site.put("/go/example.org/!answer/@v/list", "v1.0.0\nv2.0.0\n");
        for (number, year) in [("v1.0.0", 2024), ("v2.0.0", 2025)] {
            let info = format!(r#"{{"Version": "{number}", "Time": "{year}-06-01T00:00:00Z"}}"#);
            site.put(&format!("/go/example.org/!answer/@v/{number}.info"), info);
            site.put(&format!("/go/example.org/!answer/@v/{number}.zip"), number);
        }
        site.put("/snapshot/debian/20241231T235959Z/dists/stable/InRelease", "then");
        site.put("/deb/debian/dists/stable/InRelease", "now");
        let before = "before=2025-01-01";
        let rules = ["npm", "go", "apt"].map(|preset| format!("{preset},{before}"));
        let sandbox = Sandbox::new(&network, &rules.each_ref().map(String::as_str));
        let (status, document) = get(&sandbox, "x", "/npm/answer");
        assert!(status == 200 && !document.contains("2.0.0"), "{document}");
        assert_eq!(get(&sandbox, "x", "/npm/answer/-/answer-1.0.0.tgz"), (200, "old".to_owned()));
        for path in ["/npm/answer/-/answer-2.0.0.tgz", "/npm/answer/2.0.0"] {
            assert_eq!(get(&sandbox, "x", path).0, 404, "{path}");
        }
        let go = "/go/example.org/!answer/@v";
        assert_eq!(get(&sandbox, "x", &format!("{go}/list")), (200, "v1.0.0\n".to_owned()));
        assert_eq!(get(&sandbox, "x", &format!("{go}/v1.0.0.zip")), (200, "v1.0.0".to_owned()));
        for kind in ["info", "mod", "zip"] {
            assert_eq!(get(&sandbox, "x", &format!("{go}/v2.0.0.{kind}")).0, 404, "{kind}");
        }
        // The archive is asked for by its own name, which the node answers for itself.
        assert_eq!(sandbox.ask("deb.debian.org.", RecordType::A).1, [GATEWAY]);
        assert_eq!(world.asked(), Vec::<String>::new());
        let release = "/debian/dists/stable/InRelease";
        assert_eq!(get(&sandbox, "deb.debian.org", release), (200, "then".to_owned()));
        let open = Sandbox::new(&network, &["apt,deny=nano"]);
        assert_eq!(get(&open, "deb.debian.org", release), (200, "now".to_owned()));
        let denied = "/debian/pool/main/n/nano/nano_7.2-1_amd64.deb";
        assert_eq!(get(&open, "deb.debian.org", denied).0, 404);
        assert_eq!(open.denied(|d| d.reason == Reason::Hidden).name, "nano");
    });
}

#[test]
fn a_client_that_says_nonsense_or_nothing_harms_nobody() {
    on_a_host(|world| {
        let (site, network) = registries(&world);
        python_packages(&site);
        let sandbox = Sandbox::new(&network, &["pypi"]);
        let silent = sandbox.connect(GATEWAY, 80).unwrap();
        for bytes in [
            &b"\0\0\0"[..],
            b"GET / HTTP/9\r\n\r\n",
            b"PUT /pypi/simple/a/ HTTP/1.1\r\nhost: x\r\n\r\n",
        ] {
            let mut stream = sandbox.connect(GATEWAY, 80).unwrap();
            stream.write_all(bytes).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            let mut answer = Vec::new();
            let _reset = stream.read_to_end(&mut answer);
            let text = String::from_utf8_lossy(&answer);
            assert!(answer.is_empty() || text.starts_with("HTTP/1.1 4"), "{text}");
        }
        assert_eq!(get(&sandbox, "x", "/pypi/simple/answer/").0, 200);
        // Another policy ends what is open here as well.
        sandbox.member.set_policy(netpolicy::Policy::default()).unwrap();
        silent.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        assert!(matches!((&silent).read(&mut [0]), Ok(0) | Err(_)));
    });
}
